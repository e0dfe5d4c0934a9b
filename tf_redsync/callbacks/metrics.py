"""`CompressionMetrics`: what the exchange does, in the logs of `fit` and in files."""

from __future__ import annotations

import dataclasses
import math
import os
import time
import warnings
from typing import Any

import keras
import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.callbacks.common import OfBothKeras, exchange_of
from tf_redsync.config import serialize
from tf_redsync.exchange import collectives
from tf_redsync.keras import training_state
from tf_redsync.keras.fit_hook import ForTfKeras
from tf_redsync.metrics import records
from tf_redsync.metrics.events import Events
from tf_redsync.metrics.sampling import Sample, Sampler
from tf_redsync.metrics.time_split import STEP as PROFILED
from tf_redsync.metrics.time_split import NoProfile, Profiler, Split

IN_BAR = ("compression_ratio", "bytes_per_step")
_PARTS = ("compute", "select", "exchange", "wait", "decode", "input")
_PROFILED_STEPS = 3
_FIRST_PROFILE = 10  # batches of `fit` before it, which trace and warm up
_SHARE = 0.005  # of the time, that the profiles after the first one may take
_HISTOGRAM_ELEMENTS = 100_000  # of each variable


class CompressionMetrics(OfBothKeras):
    """Shows what the exchange of gradients does: how much is sent, what waits, where time goes.

    Adds to the logs of every epoch, and so to `History`, `CSVLogger`, Keras's `TensorBoard`:

    * `compression_ratio`: bytes of dense all-reduces by bytes sent, over the epoch;
    * `bytes_per_step`, the mean over the epoch, and `bytes_sent`, in all: by this worker;
    * `density`: share of the elements that this worker sent in the last step;
    * `residual_norm`: norm of what waits in this worker's residuals;
    * `skipped_steps`: of the epoch (in the logs without this callback as well);
    * `step_ms`, the mean, and of a few profiled steps `compute_ms`, `select_ms`, `exchange_ms`,
      `wait_ms`, `decode_ms`, `input_ms`.

    The ratio, the bytes a step and the skipped steps stand in the progress bar. With
    `run_dir`, each worker that has this callback writes `worker-<rank>.jsonl` there, with density
    and residual norm of each variable, and worker 0 scalars and histograms of the residuals for
    TensorBoard (if it is installed). `tf_redsync.report(run_dir)` makes a page of it.
    docs/metrics.md says how each number is obtained, what it cannot tell, and what it costs.

    Give it to `fit` of Keras 3 or tf_keras, on all workers or on some: it asks nothing of other
    workers. A training that goes on in the same `run_dir` goes on in its files.

    Args:
        run_dir: Directory for the files; `None` for the logs alone.
        every: Steps between two samples. The first one is taken after the first step.
        time_split: Whether to profile a few steps now and then. Switch it off to use TensorFlow's
            profiler otherwise: one at a time can run in a process.

    Raises:
        ValueError: for bad arguments; in `fit`, for an optimizer that is not a
            `DistributedOptimizer`.

    Example:
        >>> import tf_redsync as rs
        >>> metrics = rs.callbacks.CompressionMetrics("/tmp/run1", every=50)
        >>> # model.fit(..., callbacks=[metrics]); rs.report("/tmp/run1")
    """

    comes_first = True  # what it adds to the logs is for the others, see `fit_hook.py`
    _supports_tf_logs = False  # so that tf_keras hands out a copy of its logs, as Keras 3 does

    def __init__(
        self,
        run_dir: str | os.PathLike[str] | None = None,
        every: int = 100,
        time_split: bool = True,
    ) -> None:
        super().__init__()
        if run_dir is not None and (
            not isinstance(run_dir, (str, os.PathLike)) or not os.fspath(run_dir)
        ):
            raise ValueError(f"`run_dir` must be a path, or None. Received: run_dir={run_dir!r}")
        checks.integer("every", every, low=1)
        checks.boolean("time_split", time_split)
        self.run_dir = None if run_dir is None else os.fspath(run_dir)
        self.every, self.time_split = every, time_split
        self.before_bar = _LeaveOut()
        self._sampler: Sampler | None = None
        self._file: records.RunFile | None = None
        self._events: Events | None = None
        self._profiler = Profiler()
        self._trace: Any = None
        self._split: Split | None = None
        self._no_split = "" if time_split else "time_split=False"

    # ---------------------------------------------------------------------------------- the hooks

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check the optimizer; forget the last `fit`."""
        exchange_of(self)
        self._close()  # of a `fit` that did not end
        self._sampler = None
        self._began = time.time()
        self._epoch, self._batches, self._shown = 0, 0, dict[str, float]()
        self._since, self._timed, self._seconds = 0, 0, 0.0
        self._epoch_timed, self._epoch_seconds = 0, 0.0
        self._last: tuple[int, float] | None = None  # step and bytes at the last sample
        self._profiled = 0
        self._next_profile = self._began
        self._in_file = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Start the epoch's means."""
        self._epoch, self._next_batch = epoch, 0
        self._epoch_timed, self._epoch_seconds = 0, 0.0
        exchange = exchange_of(self)
        built = exchange.built
        self._epoch_start = (
            int(exchange.step.numpy()) if built else 0,
            float(exchange.bytes_in_all.numpy()) if built else 0.0,
        )

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Start the clock, and perhaps a profile."""
        if self._batches and self._profile_is_due():
            self._start_profile()
        if self._profiled:
            self._trace = tf.profiler.experimental.Trace(PROFILED, step_num=batch, _r=1)
            self._trace.__enter__()
        self._begun = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Stop the clock; take a sample if it is time."""
        seconds = time.perf_counter() - self._begun
        steps, self._next_batch = batch + 1 - self._next_batch, batch + 1
        steps = max(steps, 1)
        if self._profiled:
            self._end_profiled(steps)
        self._batches += 1
        if self._batches > 1:  # the first one traces
            self._timed, self._seconds = self._timed + steps, self._seconds + seconds
            self._epoch_timed += steps
            self._epoch_seconds += seconds
        self._since += steps
        if self._since >= self.every or self._batches == 1:
            self._take_sample(dict(logs or {}))
        if logs is not None:
            logs.update(self._shown)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the epoch's numbers to its logs."""
        if self._sampler is None:  # no step at all
            return
        # The first profile is waited for, so that all epochs have it.
        self._look_at_profile(wait=10.0 if self._split is None else 0.0)
        sample = self._sampler.sample()
        found = self._of_epoch(sample)
        if self._file is not None:
            trial = self._trial()
            self._file.append(
                "epoch", epoch=epoch, step=sample.step, time=time.time(), trial=trial,
                logs={**(logs or {}), **found},
            )  # fmt: skip
        if self._events is not None:
            residuals = self._sampler.residuals(_HISTOGRAM_ELEMENTS)
            self._events.write(
                sample.step, {}, {f"residual/{name}": r for name, r in residuals.items()}
            )
        if logs is not None:
            logs.update(found)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Close the files."""
        if self._sampler is not None:
            self._look_at_profile(wait=10.0)
            if self._file is not None:
                step = int(self._sampler.exchange.step.numpy())
                self._file.append("end", step=step, time=time.time())
        self._close()

    # ------------------------------------------------------------------------------------ samples

    def _take_sample(self, logs: dict[str, Any]) -> None:
        if self._sampler is None or self._sampler.stale:
            self._sampler = Sampler(exchange_of(self))
        sampler, sample = self._sampler, self._sampler.sample()
        if not self._in_file:
            self._in_file = True
            self._open(sampler, sample)
        self._look_at_profile()
        step, sent = self._last or self._epoch_start
        steps = max(sample.step - step, 1)
        in_steps = sample.bytes_sent - sent
        self._last = sample.step, sample.bytes_sent
        step_ms = 1e3 * self._seconds / self._timed if self._timed else math.nan
        self._since, self._timed, self._seconds = 0, 0, 0.0
        scalars = {
            "compression_ratio": sampler.ratio(in_steps, steps),
            "bytes_per_step": in_steps / steps,
            "bytes_sent": self._in_all(sample),
            "density": sampler.overall(sample.density),
            "residual_norm": sample.residual_norm,
            "skipped_steps": sample.skipped,
            "step_ms": step_ms,
        }
        self._shown = {name: scalars[name] for name in IN_BAR}
        if self._file is not None:
            now = time.time()
            layers = {"density": sample.density, "residual": sample.residual}
            self._file.append(
                "sample", step=sample.step, epoch=self._epoch, seconds=now - self._began, time=now,
                **scalars, logs=logs, layers=layers,
            )  # fmt: skip
        if self._events is not None:
            by_layer = zip(sampler.names, sample.density, sample.residual, strict=True)
            for name, density, residual in by_layer:
                scalars[f"density/{name}"] = float(density)
                if not math.isnan(residual):
                    scalars[f"residual_norm/{name}"] = float(residual)
            self._events.write(
                sample.step, {f"tf_redsync/{k}": v for k, v in scalars.items() if not _nan(v)}
            )

    def _of_epoch(self, sample: Sample) -> dict[str, float]:
        assert self._sampler is not None
        steps, sent = sample.step - self._epoch_start[0], sample.bytes_sent - self._epoch_start[1]
        steps = max(steps, 1)
        found = {
            "compression_ratio": self._sampler.ratio(sent, steps),
            "bytes_per_step": sent / steps,
            "bytes_sent": self._in_all(sample),
            "density": self._sampler.overall(sample.density),
            "residual_norm": sample.residual_norm,
            "step_ms": 1e3 * self._epoch_seconds / self._epoch_timed
            if self._epoch_timed
            else math.nan,
        }
        if self._split is not None or not self._no_split:
            times = dataclasses.asdict(self._split) if self._split is not None else {}
            found |= {f"{part}_ms": times.get(part, math.nan) for part in _PARTS}
        return found

    def _in_all(self, sample: Sample) -> float:
        """Bytes of this process, and of those before it that the file tells of."""
        assert self._sampler is not None
        return sample.bytes_sent + (self._sampler.exchange.bytes_before or 0.0)

    def _trial(self) -> str | None:
        """What the trial of `Auto` came to, if there is one that has ended."""
        times = getattr(exchange_of(self).program, "times", None)
        verdict = 0 if times is None else int(times.verdict.numpy())
        return {1: "compressed", 2: "dense"}.get(verdict)

    # -------------------------------------------------------------------------------------- files

    def _open(self, sampler: Sampler, sample: Sample) -> None:
        """Open the files, once the exchange is there."""
        exchange = sampler.exchange
        if self.run_dir is None:
            return
        rank = collectives.worker_rank(exchange.strategy)
        if exchange.bytes_before is None:
            exchange.bytes_before = _bytes_before(self.run_dir, rank, sample.step)
        self._file = records.RunFile(self.run_dir, rank)
        self._events = Events(self.run_dir, rank) if rank == 0 else None
        explained = self.model.optimizer.explain()
        self._file.append(
            "run",
            format=records.FORMAT,
            time=self._began,
            step=self._epoch_start[0],
            epoch=self._epoch,
            every=self.every,
            versions=training_state.versions(self.model),
            rank=rank,
            workers=exchange.workers,
            model=self.model.name,
            optimizer=type(self.model.optimizer.inner_optimizer).__name__,
            policy=serialize(exchange.policy),
            dense_bytes=explained.dense_bytes,
            expected_bytes=explained.bytes_per_step,
            decision=explained.decision,
            explained=str(explained),
            time_split=self._no_split or "profiled",
            variables=[dataclasses.asdict(row) for row in explained.rows],
        )

    def _close(self) -> None:
        self._profiler.abandon()
        self._leave_trace()
        self._profiled = 0
        for output in (self._file, self._events):
            if output is not None:
                output.close()
        self._file = self._events = None

    # ----------------------------------------------------------------------------------- profiles

    def _profile_is_due(self) -> bool:
        if self._no_split or self._profiler.busy or time.time() < self._next_profile:
            return False
        if self._split is not None:
            return True
        steps = self.params.get("steps") or math.inf
        return self._batches >= min(_FIRST_PROFILE, steps // 2)

    def _start_profile(self) -> None:
        self._profile_began = time.time()
        try:
            self._profiler.start()
        except NoProfile as error:
            self._give_up_profiles(error)
        else:
            self._profiled = _PROFILED_STEPS

    def _end_profiled(self, steps: int) -> None:
        self._leave_trace()
        self._profiled -= 1
        if not self._profiled:
            self._profiler.stop(steps)

    def _leave_trace(self) -> None:
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.__exit__(None, None, None)

    def _look_at_profile(self, wait: float = 0.0) -> None:
        """Take over what a profile has found, and plan the next one."""
        if self._profiled:  # of an epoch that ended meanwhile: go on in the next one
            return
        try:
            split = self._profiler.result(wait)
        except NoProfile as error:
            self._give_up_profiles(error)
            return
        if split is None:
            return
        self._split, now = split, time.time()
        took = now - self._profile_began
        self._next_profile = now + took / _SHARE
        step = int(exchange_of(self).step.numpy())
        times = {f"{name}_ms": ms for name, ms in dataclasses.asdict(split).items()}
        if self._file is not None:
            self._file.append("split", step=step, time=now, **times)
        if self._events is not None:
            self._events.write(step, {f"tf_redsync/time/{name}": t for name, t in times.items()})

    def _give_up_profiles(self, why: NoProfile) -> None:
        self._no_split = str(why)
        if self._file is not None:
            self._file.append("no_split", why=self._no_split)
        warnings.warn(
            f"`CompressionMetrics` does not tell where the time of a step goes: {why}. The other "
            "metrics go on. time_split=False says that this is meant.",
            stacklevel=4,
        )


class _LeaveOut(ForTfKeras, keras.callbacks.Callback):
    """Called after all that keep logs and before the progress bar: leaves it the short list."""

    comes_last = True

    @override
    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        others = (
            "bytes_sent",
            "density",
            "residual_norm",
            "step_ms",
            *(f"{part}_ms" for part in _PARTS),
        )
        for name in others:
            (logs or {}).pop(name, None)


def _bytes_before(run_dir: str, rank: int, step: int) -> float:
    """What a worker had sent before this process began, by its file."""
    try:
        found = next((f for f in records.read(run_dir) if f.rank == rank), None)
    except OSError:
        return 0.0
    sent = 0.0
    for record in found.records if found else ():
        if record["record"] == "run" and record.get("step") == 0:
            sent = 0.0
        elif record["record"] == "sample" and record.get("step", math.inf) < step:
            sent = max(sent, record.get("bytes_sent") or 0.0)
    return sent


def _nan(value: float) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
