"""Where metrics of a training go besides Keras's logs: the worker's file, and TensorBoard's."""

from __future__ import annotations

import dataclasses
import math
import os
import time
import weakref
from collections.abc import Mapping
from typing import Any

from tf_redsync.config import serialize
from tf_redsync.metrics import records
from tf_redsync.metrics.events import Events
from tf_redsync.metrics.sampling import Sample, Sampler
from tf_redsync.metrics.time_split import Split
from tf_redsync.network import collectives

_HISTOGRAM_ELEMENTS = 100_000  # of each variable


# By exchange, the bytes that earlier processes have sent, once a file of theirs has been read.
_before: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()


def bytes_before(exchange: Any) -> float:
    """Return what this worker had sent before this process began, as far as a file has told."""
    return _before.get(exchange, 0.0)


class Outputs:
    """The files of one `fit` on one worker.

    Args:
        run_dir: The run directory.
        sampler: Reads the exchange.
        optimizer: The wrapper.
        run: What else the run's first record says.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        sampler: Sampler,
        optimizer: Any,
        run: Mapping[str, Any],
    ):
        exchange = sampler.exchange
        rank = collectives.worker_rank(exchange.strategy)
        if exchange not in _before:
            _before[exchange] = _bytes_before(run_dir, rank, run["step"])
        self._sampler = sampler
        self._began = time.time()
        self._file = records.RunFile(run_dir, rank)
        self._events = Events(run_dir, rank) if rank == 0 else None
        explained = optimizer.explain()
        self._file.append(
            "run",
            format=records.FORMAT,
            time=self._began,
            **run,
            rank=rank,
            workers=exchange.workers,
            optimizer=type(optimizer.inner_optimizer).__name__,
            policy=serialize(exchange.policy),
            dense_bytes=explained.dense_bytes,
            expected_bytes=explained.bytes_per_step,
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
        """Write a sample, with what it says of each variable.

        Args:
            sample: The sample.
            at: When its step ended, in seconds since 1970.
            epoch: Its epoch.
            scalars: Numbers of the steps since the sample before.
            logs: Keras's.
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
        """Write where the time of a step went."""
        times = {f"{name}_ms": ms for name, ms in dataclasses.asdict(split).items()}
        self._file.append("split", step=step, time=time.time(), **times)
        if self._events is not None:
            self._events.scalars(step, {f"tf_redsync/time/{n}": t for n, t in times.items()})

    def no_split(self, why: str) -> None:
        """Write why there are no profiles."""
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


def mean_logs(model: Any, logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the logs of a batch as means over the workers.

    tf_keras adds up what its replicas have, and takes the mean when the epoch ends.
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
    """What the trial of `Auto` came to, if there is one that has ended."""
    times = getattr(exchange.schedule, "times", None)
    verdict = 0 if times is None else int(times.verdict.numpy())
    return {1: "compressed", 2: "dense"}.get(verdict)


def _bytes_before(run_dir: str | os.PathLike[str], rank: int, step: int) -> float:
    """What a worker had sent before this process began, by its file.

    Args:
        run_dir: The run directory.
        rank: The worker's.
        step: The step that this process has begun with.
    """
    try:
        found = next((f for f in records.read(run_dir) if f.rank == rank), None)
    except OSError:
        return 0.0
    sent = 0.0
    for record in found.records if found and step else ():
        if record["record"] == "run" and not record.get("step"):  # from the start
            sent = 0.0
        elif record["record"] == "sample" and record.get("step", math.inf) <= step:
            sent = record.get("bytes_sent") or sent
        elif record["record"] == "epoch" and record.get("step", math.inf) <= step:
            sent = (record.get("logs") or {}).get("bytes_sent") or sent
    return sent
