"""Watchdog: detects deadlocked workers and reports every worker's step.

A collective that some worker does not join never returns. So a thread of each process reports its
steps and waits to the chief through the coordination service, every two seconds and immediately
after a failed collective. The chief's thread runs the `StallDetector` and answers all workers.
After a verdict every worker's thread aborts the collectives of its process, and the waiting step
raises with the verdict.

Keys are numbered and deleted after reading, because the service does not overwrite keys. The
service also keeps each query whose client has timed out, so a thread requests only keys that some
worker will publish.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from typing_extensions import override

from tf_redsync import environment
from tf_redsync.cluster import coordination, step_counters
from tf_redsync.cluster.stall_detector import (
    BROKEN_SECONDS,
    SILENT_SECONDS,
    StallDetector,
    WorkerReport,
)
from tf_redsync.errors import uncaught
from tf_redsync.network import groups, strategies

DEFAULT_TIMEOUT_SECONDS = 600.0
PERIOD_SECONDS = 2.0
_NO_ANSWER_SECONDS = 5.0  # without the chief's answer, a worker runs its own detector
_READ_SECONDS = 0.25  # the chief's wait for all reports, which should be there
_LEAST_SECONDS = 0.05  # its wait for each report after that
_LINGER_SECONDS = 2.0  # time for the others to read a last answer before the chief ends
_FAILURE_SECONDS = 15.0  # time for a report, a verdict, and its delivery to all workers
_STUCK_SECONDS = 20.0  # time for a step to end by itself after a verdict
_MAX_TEXT = 300
_PREFIX = "tf_redsync/watchdog"
_logger = logging.getLogger("tf_redsync")


class _Process:
    """State that this process reports, and the verdict; shared by all strategies."""

    def __init__(self) -> None:
        self.agreements = 0
        self.waits: str | None = None
        self.broadcasts: int | None = None
        self.failed = ""
        self.broken = False
        self.last = ""
        self.verdict: str | None = None
        self.thread: _Thread | None = None

    def report(self, ended: bool) -> WorkerReport:
        return WorkerReport(
            agreements=self.agreements,
            waits=self.waits,
            last=self.last,
            ended=ended,
            broadcasts=self.broadcasts,
            failed=self.failed,
            error=uncaught()[:_MAX_TEXT] if ended else "",
            broken=self.broken,
            **step_counters.values(),
        )


def _inside_tensorflow() -> bool:
    """Return whether the main thread is inside TensorFlow, where no exception reaches it."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and frame.f_globals.get("__name__", "").startswith("tensorflow.")


_process = _Process()


def start(
    strategy: tf.distribute.Strategy,
    timeout_seconds: float | None,
    heartbeat_seconds: float | None = None,
) -> None:
    """Watch the workers of a strategy; a no-op with one worker or without a limit.

    Args:
        strategy: A strategy, the same on all workers.
        timeout_seconds: Seconds that a worker may be behind the others, equal on all workers. The
            last strategy's value applies. `None`: no limit.
        heartbeat_seconds: As in `lost_after`.
    """
    silent_seconds = SILENT_SECONDS if heartbeat_seconds is None else heartbeat_seconds / 2
    if strategies.process_count(strategy) == 1:
        return
    step_counters.create()
    if not strategies.is_redsync_strategy(strategy):
        step_counters.watch_batches(strategy)
    if _process.thread is not None:
        _process.thread.detector.timeout_seconds = timeout_seconds
        _process.thread.detector.silent_seconds = silent_seconds
    elif timeout_seconds is not None:
        _process.thread = _Thread(strategy, timeout_seconds, silent_seconds)
        _process.thread.start()
        atexit.register(_process.thread.end)


def heartbeat(heartbeat_seconds: float | None) -> float | None:
    """Return the heartbeat seconds of the argument or the environment variable, if any.

    Raises:
        ValueError: if the argument or the variable is not a number above 10 s.
    """
    return environment.seconds(
        "heartbeat_seconds", heartbeat_seconds, environment.HEARTBEAT, low=5 * PERIOD_SECONDS
    )


def lost_after(timeout_seconds: float | None, heartbeat_seconds: float | None) -> float | None:
    """Return the seconds without a heartbeat after which TensorFlow itself ends a training.

    TensorFlow is the fallback for a missing watchdog. The watchdog, whose message names causes and
    steps, reacts earlier: after half of `heartbeat_seconds` if they are given.

    Args:
        timeout_seconds: The watchdog's limit; `None` without a watchdog.
        heartbeat_seconds: The user's value, if any.

    Returns:
        Seconds; `None` for no limit.
    """
    if heartbeat_seconds is not None or timeout_seconds is None:
        return heartbeat_seconds
    return min(timeout_seconds, SILENT_SECONDS) + 30.0


@contextmanager
def waiting_for_agreement(action: str) -> Iterator[None]:
    """Context in which this worker waits for all others to agree on `action`."""
    _process.agreements += 1
    with waiting_for_others(action):
        yield


@contextmanager
def waiting_for_others(action: str) -> Iterator[None]:
    """Context in which this worker waits until all can do `action`; not all need to wait."""
    before = _process.waits, _process.broadcasts  # of a variable whose values are compared
    _process.waits, _process.broadcasts = action[:_MAX_TEXT], None
    try:
        yield
        _process.last = action[:_MAX_TEXT]
    finally:
        _process.waits, _process.broadcasts = before


def begin_broadcast(action: str, size: int) -> None:
    """Record that this worker takes part in a broadcast of `size` bytes, for `action`."""
    _process.waits, _process.broadcasts = action[:_MAX_TEXT], size


def end_broadcast() -> None:
    """Record the end of the broadcast, if there was one."""
    _process.waits, _process.broadcasts = None, None


def verdict_after_failure(error: str) -> str | None:
    """Report a failed broadcast; return the verdict if one comes within seconds."""
    _process.failed = f"{_process.waits}: {error}"[: 2 * _MAX_TEXT]
    end_broadcast()
    return _wait_for_verdict()


def verdict_after_loss() -> str | None:
    """Report a failed collective; return the verdict if one comes within seconds."""
    _process.broken = True
    try:
        return _wait_for_verdict()
    finally:
        _process.broken = False


def _wait_for_verdict() -> str | None:
    thread, ends = _process.thread, time.monotonic()
    if thread is not None and thread.is_alive():
        thread.hurry()
        ends += _FAILURE_SECONDS
    while _process.verdict is None and time.monotonic() < ends:
        time.sleep(0.1)
    return _process.verdict


def verdict() -> str | None:
    """Return the verdict, which is the reason why the workers cannot continue, or `None`."""
    return _process.verdict


class _Thread(threading.Thread):
    """Thread that reports, runs the detector or asks the chief, and aborts collectives."""

    def __init__(
        self, strategy: tf.distribute.Strategy, timeout_seconds: float, silent_seconds: float
    ):
        super().__init__(name="tf_redsync_watchdog", daemon=True)
        workers = strategies.process_count(strategy)
        self._rank, self._tasks = strategies.process_rank(strategy), groups.task_names(strategy)
        self._store = coordination.key_value_store()
        self._over, self._wake = threading.Event(), threading.Event()
        self._pid = os.getpid()
        self._now = 0.0
        self._tick = time.monotonic()
        ranks = range(workers) if self._rank == 0 else (0, self._rank)
        self.detector = StallDetector(
            ranks,
            timeout_seconds,
            lambda rank: coordination.is_alive(self._tasks[rank]),
            lambda rank: coordination.is_gone(self._tasks[rank]),
            silent_seconds,
        )
        self._others = range(1, workers)

    def end(self) -> None:
        """Report the end of the program to the other workers."""
        if os.getpid() == self._pid:  # a forked child does not have the thread
            self._over.set()
            self.hurry()
            self.join(_LINGER_SECONDS + PERIOD_SECONDS)

    def hurry(self) -> None:
        """End the current pause between two reports."""
        self._wake.set()

    def _pause(self, seconds: float) -> None:
        self._wake.wait(seconds)
        self._wake.clear()

    @override
    def run(self) -> None:
        try:
            if self._rank == 0:
                self._run_chief()
            else:
                self._run_member()
        except Exception as error:  # the watchdog must not disturb the user's program
            _logger.debug("the watchdog ends: %s", error)

    def _clock(self) -> float:
        """Return the seconds that this thread has run, excluding pauses of the process."""
        before, self._tick = self._tick, time.monotonic()
        self._now += min(self._tick - before, 2 * PERIOD_SECONDS)
        return self._now

    def _run_chief(self) -> None:
        numbers = dict.fromkeys(self._others, 0)  # number of the next report of each live worker
        while True:
            over = self._over.is_set()
            own_report = _process.report(over)
            self.detector.hear(0, own_report, self._clock())
            # A worker that does not ask in time would miss the end and report a killed process.
            ends = time.monotonic() + (_LINGER_SECONDS if over else _READ_SECONDS)
            reports = {r: self._read(r, n, ends) for r, n in numbers.items()}
            reason = self.detector.verdict(self._clock())
            for text in self.detector.warnings(self._now).values():
                _logger.warning("%s", text)
            for rank, report in reports.items():
                # A last answer also serves workers that ask later.
                if report is not None or reason or over:
                    words = {"verdict": reason, **vars(own_report)}
                    self._publish(f"answer/{rank}/{numbers[rank]}", words)
                if report is not None:
                    numbers[rank] += 1
                    if report.ended:
                        del numbers[rank]
            if reason and any(not self.detector.is_lost(r) for r in numbers):
                time.sleep(_LINGER_SECONDS)
            if over:
                return
            if reason:
                self._abort(reason)
                return
            self._pause(BROKEN_SECONDS if own_report.broken else PERIOD_SECONDS)

    def _read(self, rank: int, number: int, ends: float) -> WorkerReport | None:
        """Return a worker's next report if it is there or arrives before `ends`, else `None`."""
        key = f"report/{rank}/{number}"
        text = self._query(key, max(_LEAST_SECONDS, ends - time.monotonic()))
        now = self._clock()  # even if no report came: one pass over the workers may take seconds
        if text is None:
            return None
        self._delete_key(key)
        report = WorkerReport.from_text(text)
        self.detector.hear(rank, report, now)
        return report

    def _run_member(self) -> None:
        number, pending, last_answer, chief = 0, False, self._clock(), WorkerReport()
        while True:
            over = self._over.is_set()
            report, now = _process.report(over), self._clock()
            self.detector.hear(self._rank, report, now)
            if over and pending:  # the last report has its own number, after the unread one
                number, pending = number + 1, False
            if not pending and not chief.ended:
                pending = self._publish(f"report/{self._rank}/{number}", vars(report))
            if over:
                return
            text, reason = None, None
            if pending:
                text = self._query(f"answer/{self._rank}/{number}", PERIOD_SECONDS)
            if text is not None:
                self._delete_key(f"answer/{self._rank}/{number}")
                number, pending, last_answer = number + 1, False, self._clock()
                answer = json.loads(text)
                reason, chief = answer.pop("verdict"), WorkerReport(**answer)
                self.detector.hear(0, chief, last_answer)
                if self._rank in (late := self.detector.warnings(last_answer)):
                    _logger.warning("%s", late[self._rank])
            elif chief.ended or report.broken or now - last_answer >= _NO_ANSWER_SECONDS:
                reason = self.detector.verdict(now)
            if reason:
                self._abort(reason)
                return
            if not pending:  # a late report is up to date when the chief reads it
                self._pause(PERIOD_SECONDS / 2)

    def _abort(self, reason: str) -> None:
        _process.verdict = reason
        _logger.error("%s", reason)
        coordination.abort_collectives(reason)
        self._exit_if_stuck_for_data()

    def _exit_if_stuck_for_data(self) -> None:
        """End the process if its step still waits for data, since an abort does not reach it."""
        before, ends = _process.report(False), time.monotonic() + _STUCK_SECONDS
        while time.monotonic() < ends:
            if (
                not before.lacks_data
                or _process.report(False) != before
                or not _inside_tensorflow()
            ):
                return
            if self._over.wait(PERIOD_SECONDS):
                return
        _logger.critical("the input pipeline of this worker does not respond: its process ends")
        sys.stdout.flush()
        logging.shutdown()
        os._exit(1)

    def _publish(self, key: str, values: dict[str, Any]) -> bool:
        """Publish a report or an answer; return whether the service has it."""
        try:
            # The key exists if an earlier request succeeded and its answer was lost.
            with contextlib.suppress(tf.errors.AlreadyExistsError):
                self._store.set_config_key_value(f"{_PREFIX}/{key}", json.dumps(values))
        except tf.errors.OpError as error:
            _logger.debug("%s", error)
            return False
        return True

    def _query(self, key: str, seconds: float) -> str | None:
        """Return a text that another worker publishes within `seconds`, else `None`."""
        try:
            return self._store.get_config_key_value(f"{_PREFIX}/{key}", int(1000 * seconds))
        except tf.errors.DeadlineExceededError:
            return None
        except tf.errors.OpError as error:
            _logger.debug("%s", error)
            self._pause(seconds)
            return None

    def _delete_key(self, key: str) -> None:
        with contextlib.suppress(tf.errors.OpError):
            self._store.delete_config_key_value(f"{_PREFIX}/{key}")
