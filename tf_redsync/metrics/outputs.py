"""Outputs of the metrics besides Keras's logs: the worker's JSON lines and TensorBoard events."""

from __future__ import annotations

import dataclasses
import math
import os
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tf_redsync.config import serialize
from tf_redsync.exchange.layout import Bucket
from tf_redsync.methods.known_losses import known_loss
from tf_redsync.metrics import records
from tf_redsync.metrics.profiler import Split
from tf_redsync.metrics.sampling import Sample, Sampler
from tf_redsync.network import strategies

_HISTOGRAM_ELEMENTS = 100_000  # at most, per variable


# Bytes that earlier processes of a run have sent, by exchange.
_before: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()


def bytes_before(exchange: Any) -> float:
    """Return the bytes that this worker sent before this process began, from its file."""
    return _before.get(exchange, 0.0)


class Outputs:
    """Outputs of one `fit` on one worker.

    Args:
        run_dir: The run directory.
        sampler: Sampler of the exchange.
        optimizer: The `DistributedOptimizer`.
        run: Further fields of the run's first record. `bytes_sent` is that of this process, `time`
            that of the beginning of `fit`, in seconds since 1970.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        sampler: Sampler,
        optimizer: Any,
        run: Mapping[str, Any],
    ):
        exchange = sampler.exchange
        rank = strategies.process_rank(exchange.strategy)
        if exchange not in _before:
            _before[exchange] = _bytes_before(run_dir, rank, run["step"])
        self._sampler = sampler
        self._began = run["time"]
        self._file = records.RunFile(run_dir, rank)
        self._events = Events(run_dir, rank) if rank == 0 else None
        explained = optimizer.explain()
        self._file.append(
            "run",
            format=records.FORMAT,
            **{**run, "bytes_sent": round(run["bytes_sent"] + bytes_before(exchange))},
            rank=rank,
            workers=exchange.workers,
            optimizer=type(optimizer.inner_optimizer).__name__,
            policy=serialize(exchange.policy),
            dense_bytes=explained.dense_bytes,
            expected_bytes=explained.bytes_per_step,
            known_losses=_known_losses(exchange.schedule.buckets),
            decision=explained.decision,
            explained=str(explained),
            variables=[dataclasses.asdict(row) for row in explained.rows],
        )

    def sample(
        self,
        sample: Sample,
        at: float,
        epoch: int,
        scalars: dict[str, float],
        logs: dict[str, Any],
    ) -> None:
        """Write a sample.

        Args:
            sample: The sample.
            at: End of its step, in seconds since 1970.
            epoch: Its epoch.
            scalars: Metrics of the steps since the previous sample.
            logs: Keras's logs.
        """
        layers = {"density": sample.density, "residual": sample.residual}
        self._file.append(
            "sample", step=sample.step, epoch=epoch, seconds=at - self._began, time=at,
            **scalars, logs=logs, layers=layers,
        )  # fmt: skip
        if self._events is None:
            return
        shown = dict(scalars)
        by_layer = zip(self._sampler.names, sample.density, sample.residual, strict=True)
        for name, density, residual in by_layer:
            shown |= {f"density/{name}": float(density), f"residual_norm/{name}": float(residual)}
        shown = {f"tf_redsync/{n}": v for n, v in shown.items() if math.isfinite(v)}
        self._events.scalars(sample.step, shown)

    def split(self, step: int, split: Split) -> None:
        """Write the times of a profiled step."""
        times = {f"{name}_ms": ms for name, ms in dataclasses.asdict(split).items()}
        self._file.append("split", step=step, time=time.time(), **times)
        if self._events is not None:
            self._events.scalars(step, {f"tf_redsync/time/{n}": t for n, t in times.items()})

    def no_split(self, why: str) -> None:
        """Write the reason for the absence of profiles."""
        self._file.append("no_split", why=why)

    def epoch(self, epoch: int, step: int, logs: dict[str, Any]) -> None:
        """Write the end of an epoch."""
        trial = _trial(self._sampler.exchange)
        self._file.append("epoch", epoch=epoch, step=step, time=time.time(), trial=trial, logs=logs)
        if self._events is not None:
            residuals = self._sampler.residuals(_HISTOGRAM_ELEMENTS)
            self._events.histograms(step, {f"residual/{n}": r for n, r in residuals.items()})

    def end(self, step: int) -> None:
        """Write the end of `fit`."""
        self._file.append("end", step=step, time=time.time())

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._events is not None:
            self._events.close()


def _known_losses(buckets: Sequence[Bucket]) -> dict[str, str]:
    """Return what the methods in use are known to cost, by class; see `known_loss`."""
    by_method: dict[str, dict[str, None]] = {}
    for bucket in buckets:
        by_method.setdefault(type(bucket.method).__name__, {})[known_loss(bucket.method)] = None
    return {name: "; ".join(losses) for name, losses in by_method.items()}


def mean_logs(model: Any, logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the logs of a batch as means over the workers.

    During an epoch, tf_keras logs the sum over its replicas.
    """
    reduction = getattr(model, "distribute_reduction_method", None)
    if reduction not in ("auto", "sum"):
        return dict(logs)
    replicas = model.distribute_strategy.num_replicas_in_sync
    return {n: v / replicas if isinstance(v, float) else v for n, v in map(_number, logs.items())}


def _number(pair: tuple[str, Any]) -> tuple[str, Any]:
    name, value = pair
    try:
        return name, float(value)
    except (TypeError, ValueError):
        return name, value


def _trial(exchange: Any) -> str | None:
    """Return the verdict of `Auto`'s trial; `None` without a finished trial."""
    times = getattr(exchange.schedule, "times", None)
    verdict = 0 if times is None else int(times.verdict.numpy())
    return {1: "compressed", 2: "dense"}.get(verdict)


def _bytes_before(run_dir: str | os.PathLike[str], rank: int, step: int) -> float:
    """Return the bytes that a worker sent before this process began, from its file.

    The steps between the last record and `step` count with the record's bytes per step.

    Args:
        run_dir: The run directory.
        rank: Rank of the worker.
        step: First step of this process.
    """
    if not step:
        return 0.0
    try:
        for record in records.newest_first(records.path_of(run_dir, rank)):
            if record["record"] == "run" and not record.get("step"):  # the training's beginning
                return float(round((record.get("expected_bytes") or 0.0) * step))
            if record["record"] in ("sample", "epoch") and record.get("step", math.inf) <= step:
                values = record if record["record"] == "sample" else record.get("logs") or {}
                if values.get("bytes_sent") is not None:
                    per_step = values.get("bytes_per_step") or 0.0
                    return float(round(values["bytes_sent"] + per_step * (step - record["step"])))
    except OSError:
        pass
    return 0.0


FOLDER = "tensorboard"


class Events:
    """Writer of TensorBoard event files. An error becomes a warning and ends the writing.

    Args:
        directory: The run directory.
        rank: Rank of the worker.
    """

    def __init__(self, directory: str | os.PathLike[str], rank: int):
        self._folder = str(Path(directory) / FOLDER / f"worker-{rank}")
        self._writer: Any = None
        try:
            import tensorboard.summary  # noqa: F401  # `tf.summary.histogram` needs it
        except ImportError as error:
            self._give_up(f"{error}: pip install 'tf_redsync[report]', or tensorboard")
            return
        try:
            self._writer = tf.summary.create_file_writer(self._folder)
        except (tf.errors.OpError, OSError) as error:
            self._give_up(str(error))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write scalars of a step in one operation; `tf.summary.scalar` needs one for each."""
        kind = tf.compat.v1.Summary
        summary = kind(value=[kind.Value(tag=n, simple_value=v) for n, v in values.items()])
        with self._written_to(step):
            tf.summary.experimental.write_raw_pb(summary.SerializeToString())

    def histograms(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        """Write histograms of a step, and flush the writer."""
        if self._writer is None:  # histograms need TensorBoard even with a no-op writer
            return
        with self._written_to(step):
            for name, numbers in values.items():
                tf.summary.histogram(name, numbers)
            tf.summary.flush()

    @contextmanager
    def _written_to(self, step: int) -> Iterator[None]:
        writer = self._writer or tf.summary.create_noop_writer()
        try:
            with writer.as_default(step=step), tf.summary.record_if(self._writer is not None):
                yield
        except (tf.errors.OpError, OSError) as error:
            self._give_up(str(error))

    def close(self) -> None:
        """Close the writer."""
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.close()
            except (tf.errors.OpError, OSError):  # an earlier write reported it, or nothing is lost
                pass

    def _give_up(self, why: str) -> None:
        self._writer = None
        warnings.warn(
            f"`CompressionMetrics` cannot write TensorBoard events to {self._folder} ({why}). "
            "Training and the other outputs continue.",
            stacklevel=4,
        )
