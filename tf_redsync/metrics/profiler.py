"""Profiles of a few steps, and the parts of a step's time in them.

TensorFlow's profiler records this process's ops on the CPU. Their types and names
(`driver.SELECTING`, `DECODING`) tell their purpose. Profiling slows training, so profiles are short
and rare, and a thread evaluates them.

Only worker 0 profiles. TensorFlow 2.21 corrupts its memory if a recording has an event that began
in one thread and ended in another: `TraceMeRecorder::Consume` keeps pointers to elements of a
vector that grows. Such an event is the first use of a collective on another worker, which asks
worker 0 for the parameters: in a branch that is taken for the first time, in an eager step, or at
the end of an epoch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tf_redsync.exchange.driver import DECODING, SELECTING
from tf_redsync.metrics import trace_events
from tf_redsync.metrics.trace_events import Span, host_events, length, union

_STEPS = 3  # steps per profile
_FIRST = 10  # batches of `fit` before the first profile, for tracing and warm-up
_SHARE = 0.005  # maximum share of the time for profiles after the first


class Profiles:
    """Schedule of the profiles in `fit`.

    Attributes:
        last: The last result; `None` before the first.
    """

    def __init__(self) -> None:
        self.last: Split | None = None
        self._profiler = Profiler()
        self._trace: Any = None
        self._left, self._began, self._next = 0, 0.0, 0.0

    def batch_begins(self, exchange: Any, batch: int, so_far: int, per_epoch: int | None) -> None:
        """Start a profile if one is due.

        Args:
            exchange: The exchange, which is built after the first batch.
            batch: Index of the batch in the epoch.
            so_far: Number of batches of this `fit` so far.
            per_epoch: Batches per epoch; `None` if unknown.

        Raises:
            NoProfile: the profiler cannot run.
        """
        if not self._profiler.busy and self._is_due(exchange, so_far, per_epoch):
            self._began = time.monotonic()
            self._profiler.start()
            self._left = _STEPS
        if self._left:
            self._trace = tf.profiler.experimental.Trace(STEP, step_num=batch, _r=1)
            self._trace.__enter__()

    def _is_due(self, exchange: Any, so_far: int, per_epoch: int | None) -> bool:
        if self.last is not None:
            return time.monotonic() >= self._next
        first = max(1, min(_FIRST, (per_epoch or 2 * _FIRST) // 2))
        return so_far >= first and has_begun(exchange)

    def batch_ends(self, steps: int, is_last: bool) -> None:
        """Stop the profile after `_STEPS` batches or the last of the epoch.

        Args:
            steps: Training steps per batch.
            is_last: Whether the epoch ends with this batch.
        """
        if self._left:
            self._exit_trace()
            self._left = 0 if is_last else self._left - 1
            if not self._left:
                self._profiler.stop(steps)

    def epoch_ends(self) -> None:
        """Drop a profile that is not complete.

        If an epoch's length is unknown, Keras begins a batch before it finds that there is none.
        """
        if self._left:
            self.close()

    def result(self, wait: float = 0.0) -> Split | None:
        """Return a new result, or `None`; see `Profiler.result`."""
        split = self._profiler.result(wait)
        if split is not None:
            self.last, now = split, time.monotonic()
            self._next = now + (now - self._began) / _SHARE
        return split

    def close(self) -> None:
        """Stop a running profile without a result."""
        self._exit_trace()
        self._left = 0
        self._profiler.abandon()

    def _exit_trace(self) -> None:
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.__exit__(None, None, None)


def has_begun(exchange: Any) -> bool:
    """Return whether the dense warm-ups and the trial of `Auto` have ended.

    Args:
        exchange: A built exchange.
    """
    schedule, warm_up = exchange.schedule, exchange.warm_up
    times = getattr(schedule, "times", None)
    if times is not None and not int(times.verdict.numpy()):
        return False
    steps = [0, *(b.method.sync_schedule.warm_up_steps for b in schedule.buckets)]
    return int(exchange.step.numpy()) >= max(steps) + (warm_up.steps if warm_up else 0)


class Profiler:
    """Records steps with TensorFlow's profiler and evaluates them in a thread."""

    def __init__(self) -> None:
        self._folder = ""
        self._thread: threading.Thread | None = None
        self._found: Split | NoProfile | None = None

    @property
    def busy(self) -> bool:
        """Whether a profile is being recorded or evaluated."""
        return bool(self._folder) or self._thread is not None

    def start(self) -> None:
        """Start recording.

        Raises:
            NoProfile: another profile is running, or the profiler cannot run here.
        """
        if tf.config.list_logical_devices("GPU"):
            raise NoProfile("times of ops on a GPU cannot be read from a profile of the host")
        try:
            folder = tempfile.mkdtemp(prefix="tf_redsync_profile_")
        except OSError as error:
            raise NoProfile(f"no folder for temporary files ({error})") from error
        options = tf.profiler.experimental.ProfilerOptions(
            host_tracer_level=2, python_tracer_level=0, device_tracer_level=0
        )
        try:
            tf.profiler.experimental.start(folder, options)
        except (tf.errors.OpError, RuntimeError, OSError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise NoProfile(f"TensorFlow's profiler did not start ({error})") from error
        self._folder = folder

    def stop(self, steps: int) -> None:
        """Stop recording, between two steps, and start the evaluation.

        TensorFlow collects the recordings of its threads, in about 70 ms for ResNet50.

        Args:
            steps: Training steps per recorded step.
        """
        folder, self._folder = self._folder, ""
        try:
            tf.profiler.experimental.stop()
        except (tf.errors.OpError, RuntimeError, OSError) as error:
            self._found = _unreadable(error)
        self._thread = threading.Thread(
            target=self._read, args=(folder, steps), name="tf_redsync profile", daemon=True
        )
        self._thread.start()

    def _read(self, folder: str, steps: int) -> None:
        try:
            if self._found is None:
                self._found = split_of(trace_events.read(folder), steps)
        except NoProfile as error:
            self._found = error
        except Exception as error:  # the training thread reports it
            self._found = _unreadable(error)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def result(self, wait: float = 0.0) -> Split | None:
        """Return the result of the last profile, once; `None` if there is none yet.

        Args:
            wait: Maximum time to wait for the evaluation, in seconds.

        Raises:
            NoProfile: the profile cannot be evaluated.
        """
        thread = self._thread
        if thread is None:
            return None
        thread.join(wait)
        if thread.is_alive():
            return None
        self._thread, split, self._found = None, self._found, None
        if isinstance(split, NoProfile):
            raise split
        return split

    def abandon(self) -> None:
        """Stop recording without a result."""
        if self._folder:
            folder, self._folder = self._folder, ""
            with contextlib.suppress(tf.errors.OpError, RuntimeError):
                tf.profiler.experimental.stop(save=False)
            shutil.rmtree(folder, ignore_errors=True)
        if self._thread is not None:
            self._thread.join()
            self._thread, self._found = None, None


STEP = "tf_redsync_step"
_INPUT = re.compile(r"IteratorGetNext(AsOptional|Sync)?|OptionalGetValue")
_SELECT = re.compile(r"Redsync(AccumulateAndSelect|Quantize|GolombEncode|BloomBuild)")
_DECODE = re.compile(r"Redsync(Decode|DequantizeSum|GolombDecode|BloomQuery|SparseMerge)")


@dataclasses.dataclass(frozen=True)
class Split:
    """Parts of a step's time, in milliseconds. All but `exchange` add up to `step`.

    Attributes:
        compute: Ops of the model and the optimizer: forward, backward, update.
        select: Ops that make messages.
        decode: Ops that decode and sum messages.
        input: Waiting for the batch.
        wait: None of the above: only collectives, or no ops.
        exchange: Collectives, which may overlap with the parts above.
        step: The whole step.
    """

    compute: float
    select: float
    decode: float
    input: float
    wait: float
    exchange: float
    step: float


class NoProfile(RuntimeError):
    """Steps cannot be profiled; the message has the reason."""


def _unreadable(error: Exception) -> NoProfile:
    return NoProfile(f"TensorFlow's profile cannot be read ({error})")


def split_of(space: Any, steps: int) -> Split:
    """Return the mean parts of the recorded steps.

    Args:
        space: A profile from `trace_events.read`.
        steps: Training steps per recorded step.

    Raises:
        NoProfile: the profile has no complete step.
    """
    recorded, lanes = _events(space)
    if not recorded:
        raise NoProfile("TensorFlow's profile has no complete step")
    parts = [_parts(step, lanes) for step in recorded]
    per = 1e3 * len(parts) * steps  # from microseconds to milliseconds per step
    return Split(**{f.name: sum(p[f.name] for p in parts) / per for f in dataclasses.fields(Split)})


def lane(name: str, kind: str) -> str:
    """Return the field of `Split` that an op counts for."""
    if kind.startswith("Collective"):
        return "exchange"
    if _INPUT.fullmatch(kind):
        return "input"
    if _SELECT.fullmatch(kind) or SELECTING in name:
        return "select"
    if _DECODE.fullmatch(kind) or DECODING in name:
        return "decode"
    return "compute"


def _events(space: Any) -> tuple[list[Span], dict[str, list[Span]]]:
    """Return the spans of the steps and of each lane's ops, in microseconds."""
    steps, ops = host_events(space, STEP)
    lanes: dict[str, list[Span]] = {f.name: [] for f in dataclasses.fields(Split)}
    for op in ops:
        lanes[lane(op.name, op.type)].append((op.start, op.end))
    recorded = [(step.start, step.end) for step in steps]
    return recorded, {kind: union(spans) for kind, spans in lanes.items()}


def _parts(step: Span, lanes: dict[str, list[Span]]) -> dict[str, float]:
    """Return the parts of a step. If ops of several lanes overlap, the first lane below counts."""
    inside = {kind: within(step, spans) for kind, spans in lanes.items()}
    parts, covered, so_far = {}, list[Span](), 0.0
    for kind in ("select", "decode", "compute", "input"):
        covered = union([*covered, *inside[kind]])
        parts[kind] = length(covered) - so_far
        so_far += parts[kind]
    whole = step[1] - step[0]
    return parts | {"exchange": length(inside["exchange"]), "wait": whole - so_far, "step": whole}


def within(step: Span, spans: Iterable[Span]) -> list[Span]:
    """Return the intersections of spans with a step."""
    cut = ((max(start, step[0]), min(end, step[1])) for start, end in spans)
    return [(start, end) for start, end in cut if start < end]
