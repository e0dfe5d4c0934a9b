"""Profiles of a few steps now and then.

Recording costs time, so it is done for a few steps and rarely; what has been recorded is read in a
thread, beside the training.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
import threading
import time
from typing import Any

import tensorflow as tf

from tf_redsync.metrics import trace_events
from tf_redsync.metrics.time_split import STEP, NoProfile, Split, split_of

_STEPS = 3  # that are recorded
_FIRST = 10  # batches of `fit` before the first profile, which trace and warm up
_SHARE = 0.005  # of the time, that the profiles after the first one may take


class Profiles:
    """Plans profiles, around the batches of `fit`.

    Attributes:
        last: The last one.
    """

    def __init__(self) -> None:
        self.last: Split | None = None
        self._profiler = Profiler()
        self._trace: Any = None
        self._left, self._began, self._next = 0, 0.0, 0.0

    def batch_begins(self, batch: int, so_far: int, per_epoch: int | None) -> None:
        """Begin a profile if it is time.

        Args:
            batch: Its number in the epoch.
            so_far: Batches of this `fit` so far.
            per_epoch: Batches of an epoch, if that is known.

        Raises:
            NoProfile: if there can be none.
        """
        if not self._profiler.busy and self._is_due(so_far, per_epoch):
            self._began = time.time()
            self._profiler.start()
            self._left = _STEPS
        if self._left:
            self._trace = tf.profiler.experimental.Trace(STEP, step_num=batch, _r=1)
            self._trace.__enter__()

    def _is_due(self, so_far: int, per_epoch: int | None) -> bool:
        if self.last is not None:
            return time.time() >= self._next
        return so_far >= max(1, min(_FIRST, (per_epoch or math.inf) // 2))

    def batch_ends(self, steps: int) -> None:
        """End a profile after a few batches.

        Args:
            steps: Training steps in the batch.
        """
        if self._left:
            self._leave()
            self._left -= 1
            if not self._left:
                self._profiler.stop(steps)

    def result(self, wait: float = 0.0) -> Split | None:
        """Return a new profile, if one is there; see `Profiler.result`."""
        if self._left:  # the epoch ended meanwhile: it goes on in the next one
            return None
        found = self._profiler.result(wait)
        if found is not None:
            self.last, now = found, time.time()
            self._next = now + (now - self._began) / _SHARE
        return found

    def close(self) -> None:
        """End what goes on."""
        self._leave()
        self._left = 0
        self._profiler.abandon()

    def _leave(self) -> None:
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.__exit__(None, None, None)


class Profiler:
    """Records steps, and makes a `Split` of them in a thread."""

    def __init__(self) -> None:
        self._folder = ""
        self._thread: threading.Thread | None = None
        self._found: Split | NoProfile | None = None

    @property
    def busy(self) -> bool:
        """Whether it records, or what it has recorded is being read."""
        return bool(self._folder) or self._thread is not None

    def start(self) -> None:
        """Begin to record.

        Raises:
            NoProfile: if something else records already, or the profiler cannot run here.
        """
        if tf.config.list_logical_devices("GPU"):
            raise NoProfile("on a GPU the ops that a process launches say nothing of when they run")
        folder = tempfile.mkdtemp(prefix="tf_redsync_profile_")
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
        """End recording; what was recorded is read in a thread.

        Args:
            steps: How many training steps each recorded one stands for.
        """
        folder, self._folder = self._folder, ""
        self._thread = threading.Thread(
            target=self._read, args=(folder, steps), name="tf_redsync profile", daemon=True
        )
        self._thread.start()

    def _read(self, folder: str, steps: int) -> None:
        try:
            tf.profiler.experimental.stop()
            self._found = split_of(trace_events.read(folder), steps)
        except NoProfile as error:
            self._found = error
        except (tf.errors.OpError, RuntimeError, OSError, ImportError) as error:
            self._found = NoProfile(f"TensorFlow's profile cannot be read ({error})")
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def result(self, wait: float = 0.0) -> Split | None:
        """Return what was found since the last call, if it is there.

        Args:
            wait: Seconds to wait for it.

        Raises:
            NoProfile: if there is nothing to be found.
        """
        thread = self._thread
        if thread is None:
            return None
        thread.join(wait)
        if thread.is_alive():
            return None
        self._thread, found, self._found = None, self._found, None
        if isinstance(found, NoProfile):
            raise found
        return found

    def abandon(self) -> None:
        """End recording, if it goes on, without a result."""
        if self._folder:  # nobody will read it, so nothing is collected
            folder, self._folder = self._folder, ""
            with contextlib.suppress(tf.errors.OpError, RuntimeError):
                tf.profiler.experimental.stop(save=False)
            shutil.rmtree(folder, ignore_errors=True)
        if self._thread is not None:
            self._thread.join()
            self._thread, self._found = None, None
