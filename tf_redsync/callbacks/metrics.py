"""`CompressionMetrics`: metrics of the exchange, in the logs of `fit` and in files."""

from __future__ import annotations

import dataclasses
import math
import os
import time
import warnings
from collections.abc import Mapping
from typing import Any

import keras
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.keras import closing, fit_hook, models, training_state
from tf_redsync.keras.fit_hook import ForTfKeras, OfBothKeras, exchange_of
from tf_redsync.metrics.outputs import Outputs, bytes_before, mean_logs
from tf_redsync.metrics.profiler import NoProfile, Profiles
from tf_redsync.metrics.sampling import Clock, Sample, Sampler, interval
from tf_redsync.network import strategies

_FIRST_SAMPLE = 8  # batches; tf_keras warns about callbacks that are slow in the first five
_PARTS = ("compute", "select", "exchange", "wait", "decode", "input")


class CompressionMetrics(OfBothKeras):
    """Logs metrics of the exchange: bytes, density, residuals and the parts of a step's time.

    Adds to the logs of every epoch, and so to `History`, `CSVLogger` and Keras's `TensorBoard`:

    * `compression_ratio`: bytes of dense all-reduces divided by bytes sent, over the epoch;
    * `bytes_per_step`, mean over the epoch, and `bytes_sent`, total: by this worker;
    * `density`: share of the elements that this worker sent in the last step;
    * `residual_norm`: norm of this worker's residuals;
    * `skipped_steps` of the epoch, also without this callback (in samples: of the training);
    * `step_ms`, the mean; and on worker 0, from a few profiled steps, `compute_ms`, `select_ms`,
      `exchange_ms`, `wait_ms`, `decode_ms`, `input_ms`.

    The progress bar shows the ratio, the bytes per step as `kB_per_step`, and skipped steps. With
    `run_dir`, each worker with this callback writes `worker-<rank>.jsonl` there, with density and
    residual norm of each variable. Worker 0 also writes scalars and histograms of the residuals for
    TensorBoard, if it is installed. `tf_redsync.report(run_dir)` makes an HTML report of the files.
    docs/metrics.md describes the measurement, limits and cost of each metric.

    Pass it to `fit` of Keras 3 or tf_keras, on all or some workers: it does not communicate. A
    training that is resumed with the same `run_dir` appends to its files.

    Args:
        run_dir: Directory for the files; `None` for logs only.
        every: Maximum number of steps between two samples. A `fit` of fewer than 30 times as many
            steps has about 30 samples. The last step of an epoch has a sample, and the first sample
            follows the eighth batch at the latest.
        time_split: Whether worker 0 profiles a few steps at times. Pass `False` to use TensorFlow's
            profiler yourself: a process can run only one at a time.

    Raises:
        ValueError: an argument is out of range. In `fit`: the optimizer is not a
            `DistributedOptimizer`.

    Example:
        >>> import tf_redsync as rs
        >>> metrics = rs.callbacks.CompressionMetrics("/tmp/run1", every=50)
        >>> # model.fit(..., callbacks=[metrics]); rs.report("/tmp/run1")
    """

    comes_first = True  # the other callbacks use its logs; see `fit_hook.py`
    _supports_tf_logs = False  # makes tf_keras pass a copy of its logs, like Keras 3

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
            raise ValueError(f"`run_dir` must be a path or None. Received: run_dir={run_dir!r}")
        if run_dir is not None:
            checks.no_url("run_dir", run_dir)
        checks.integer("every", every, low=1)
        checks.boolean("time_split", time_split)
        self.run_dir = None if run_dir is None else os.fspath(run_dir)
        self.every, self.time_split = every, time_split
        self.before_bar = _LeaveOut()
        self._sampler: Sampler | None = None
        self._outputs: Outputs | None = None
        self._profiles = Profiles()
        self._no_split = "" if time_split else "time_split=False"

    # ---------------------------------------------------------------------------------- the hooks

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check the optimizer and reset the state of the last `fit`."""
        exchange = exchange_of(self)
        if exchange.count_elements():
            fit_hook.trace_again(exchange)
        self.close()  # left by a loop that raised, without `fit`
        closing.register(self)
        if self._sampler is not None and self._sampler.exchange is not exchange:
            self._profiles = Profiles()  # another model has other times
        if not self._no_split and strategies.process_rank(self.model.distribute_strategy) > 0:
            self._no_split = "worker 0 profiles steps"
        self._sampler, self._opened = None, False
        self._epoch, self._batches, self._next_batch = 0, 0, 0
        self._first_epoch: int | None = None
        self._steps, self._per_epoch = 0, 0  # total, and maximum per epoch
        self._fit_began = time.time()
        self._ended = 0.0  # end of the last batch
        self._batch_logs: dict[str, Any] = {}
        self._shown: dict[str, float] = {}
        self._since, self._clock, self._epoch_clock = 0, Clock(), Clock()
        self._last: tuple[int, float] | None = None  # step and bytes at the last sample

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Start the epoch's means."""
        if self._first_epoch is None:
            self._first_epoch = epoch
        self._epoch, self._next_batch, self._epoch_clock = epoch, 0, Clock()
        exchange = exchange_of(self)
        self._epoch_start = (
            (int(exchange.step.numpy()), float(exchange.bytes_in_all.numpy()))
            if exchange.built
            else (0, 0.0)
        )

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Start the clock, and a profile if one is due."""
        if not self._no_split:
            try:
                self._profiles.batch_begins(
                    exchange_of(self), batch, self._batches, self.params.get("steps")
                )
            except NoProfile as error:
                self._give_up_profiles(error)
        self._next_batch = batch  # not 0 in a resumed epoch
        self._begun = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Stop the clock, and take a sample if one is due."""
        seconds = time.perf_counter() - self._begun
        steps = models.steps_per_execution(self.model)
        self._next_batch += steps
        # With `steps_per_execution`, the next index may lie behind the epoch's end.
        is_last = self._next_batch >= (self.params.get("steps") or math.inf)
        self._profiles.batch_ends(steps, is_last)
        self._batches += 1
        self._since += steps
        self._steps += steps
        self._ended, self._batch_logs = time.time(), dict(logs or {})
        if self._batches > 1:  # the first batch includes tracing
            self._clock.add(steps, seconds)
            self._epoch_clock.add(steps, seconds)
        if self._is_due():
            self._take_sample()
        if logs is not None:
            logs.update(self._shown)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the epoch's metrics to its logs."""
        self._profiles.epoch_ends()
        if not self._batches:
            return
        sample = self._take_sample()
        # Waits for the first profile, so that all epochs have one.
        self._look_at_profile(wait=10.0 if self._profiles.last is None else 0.0)
        epoch_metrics = self._epoch_metrics(sample)
        if self._outputs is not None:
            self._outputs.epoch(epoch, sample.step, {**(logs or {}), **epoch_metrics})
        if logs is not None:
            logs.update(epoch_metrics)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Close the files."""
        if self._sampler is not None:
            self._look_at_profile(wait=10.0)
            if self._outputs is not None:
                self._outputs.end(int(self._sampler.exchange.step.numpy()))
        self.close()

    def close(self) -> None:
        """Close the files, and stop a running profile; `fit` calls it when it ends or raises."""
        closing.unregister(self)
        self._profiles.close()
        if self._outputs is not None:
            self._outputs.close()
            self._outputs = None

    # ----------------------------------------------------------------------------------- the work

    def _is_due(self) -> bool:
        if self._batches < _FIRST_SAMPLE:
            return self._since >= self.every
        return self._sampler is None or self._since >= self._interval()

    def _interval(self) -> int:
        """Return the steps between two samples, from the known length of this `fit`."""
        self._per_epoch = max(self._per_epoch, self.params.get("steps") or 0, self._next_batch)
        epochs = (self.params.get("epochs") or 1) - (self._first_epoch or 0)
        return interval(self.every, max(self._steps, epochs * self._per_epoch))

    def _take_sample(self) -> Sample:
        """Return a sample, and write it unless this step already has one."""
        if self._sampler is None or self._sampler.stale:
            self._sampler = Sampler(exchange_of(self))
        self._open(self._sampler)
        sample = self._sampler.sample()
        self._look_at_profile()
        if self._last is not None and self._last[0] == sample.step:
            return sample
        scalars = self._means(sample, *(self._last or self._epoch_start), self._clock)
        scalars["skipped_steps"] = sample.skipped
        self._last = sample.step, sample.bytes_sent
        self._since = 0 if self._since >= self._interval() else self._since
        self._clock = Clock()
        self._shown = _for_bar(scalars)
        if self._outputs is not None:
            logs = mean_logs(self.model, self._batch_logs)
            self._outputs.sample(sample, self._ended, self._epoch, scalars, logs)
        return sample

    def _epoch_metrics(self, sample: Sample) -> dict[str, float]:
        epoch_metrics = self._means(sample, *self._epoch_start, self._epoch_clock)
        split = self._profiles.last
        if split is not None or not self._no_split:
            times = dataclasses.asdict(split) if split is not None else {}
            epoch_metrics |= {f"{part}_ms": times.get(part, math.nan) for part in _PARTS}
        return epoch_metrics

    def _means(self, sample: Sample, step: int, sent: float, clock: Clock) -> dict[str, float]:
        """Return the metrics of the steps after `step`."""
        assert self._sampler is not None
        steps, in_steps = max(sample.step - step, 1), sample.bytes_sent - sent
        return {
            "compression_ratio": self._sampler.ratio(in_steps, steps),
            "bytes_per_step": in_steps / steps,
            "bytes_sent": round(sample.bytes_sent + bytes_before(self._sampler.exchange)),
            "density": self._sampler.overall(sample.density),
            "residual_norm": sample.residual_norm,
            "step_ms": clock.mean_ms,
        }

    def _open(self, sampler: Sampler) -> None:
        """Open the files, which need a built exchange."""
        if self._opened or self.run_dir is None:
            return
        self._opened = True
        run = {
            "time": self._fit_began,
            "step": self._epoch_start[0],
            "bytes_sent": self._epoch_start[1],
            "epoch": self._epoch,
            "every": self.every,
            "versions": training_state.versions(self.model),
            "model": self.model.name,
            "time_split": self._no_split or "profiled",
        }
        self._outputs = Outputs(self.run_dir, sampler, self.model.optimizer, run)

    def _look_at_profile(self, wait: float = 0.0) -> None:
        try:
            split = self._profiles.result(wait)
        except NoProfile as error:
            self._give_up_profiles(error)
            return
        if split is not None and self._outputs is not None:
            self._outputs.split(int(exchange_of(self).step.numpy()), split)

    def _give_up_profiles(self, why: NoProfile) -> None:
        self._no_split = str(why)
        if self._outputs is not None:
            self._outputs.no_split(self._no_split)
        warnings.warn(
            f"`CompressionMetrics` cannot profile steps: {why}. The other metrics continue. Pass "
            "time_split=False to silence this warning.",
            stacklevel=4,
        )


class _LeaveOut(ForTfKeras, keras.callbacks.Callback):
    """Removes metrics from the progress bar's logs; runs before it and after other callbacks."""

    comes_last = True

    @override
    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is None or "bytes_per_step" not in logs:
            return
        others = (
            "bytes_per_step",
            "bytes_sent",
            "density",
            "residual_norm",
            "step_ms",
            *(f"{part}_ms" for part in _PARTS),
        )
        logs.update(_for_bar(logs))
        for name in others:
            logs.pop(name, None)


def _for_bar(epoch_metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics in the progress bar, in units that suit its four decimals."""
    ratio, sent = epoch_metrics["compression_ratio"], epoch_metrics["bytes_per_step"]
    return {"compression_ratio": ratio, "kB_per_step": sent / 1e3}
