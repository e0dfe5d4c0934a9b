"""Finds workers that wait for each other in vain, and ends that with a text about all of them.

A collective that some worker does not join waits for ever. So each process has one thread that
tells the chief's every two seconds how many steps it has entered and what it waits for, through the
coordination service. The chief's judges (`progress.py`) and answers everyone; by a verdict, the
thread of every worker ends the collectives of its process, and what waits in them gets the text.

Keys are numbered and deleted when they are read: the service does not overwrite, and a question
that is given up is not forgotten there. So no thread asks for a key that will not come.
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
from tf_redsync.cluster.stall_detector import SILENT_SECONDS, StallDetector
from tf_redsync.cluster.worker_report import Report
from tf_redsync.error_texts import uncaught
from tf_redsync.network import collectives, groups

DEFAULT_TIMEOUT_SECONDS = 600.0
PERIOD_SECONDS = 2.0
_ALONE_SECONDS = 5.0  # without an answer of the chief, a worker judges by itself
_READ_SECONDS = 0.25  # the chief's patience with a report that should be there
_LINGER_SECONDS = 2.0  # for the others to read a verdict before the chief ends
_FAILURE_SECONDS = 15.0  # for a report, a verdict and its way to everyone
_STUCK_SECONDS = 20.0  # for a step to end by itself after a verdict
_MAX_TEXT = 300
_PREFIX = "tf_redsync/watchdog"
_logger = logging.getLogger("tf_redsync")


class _Process:
    """What this process reports, and what was found. One for all strategies."""

    def __init__(self):
        self.agreements = 0
        self.waits: str | None = None
        self.broadcasts: int | None = None
        self.failed = ""
        self.broken = False
        self.last = ""
        self.verdict: str | None = None
        self.thread: _Thread | None = None

    def report(self, ended: bool) -> Report:
        return Report(
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


def _in_a_step() -> bool:
    """Whether the main thread waits inside of TensorFlow, where no exception reaches it."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and frame.f_globals.get("__name__", "").startswith("tensorflow.")


_process = _Process()


def start(
    strategy: tf.distribute.Strategy,
    timeout_seconds: float | None,
    heartbeat_seconds: float | None = None,
) -> None:
    """Watch the workers of a strategy; with one worker, or without a limit, nothing happens.

    Args:
        strategy: A strategy, the same on all workers.
        timeout_seconds: How long a worker may be behind the others, equal on all workers. That of
            the last strategy counts.
        heartbeat_seconds: As of `lost_after`.
    """
    silent_seconds = SILENT_SECONDS if heartbeat_seconds is None else heartbeat_seconds / 2
    if collectives.worker_count(strategy) == 1:
        return
    step_counters.create()
    if not collectives.counts_steps(strategy):
        step_counters.watch_batches(strategy)
    if _process.thread is not None:
        _process.thread.judge.timeout_seconds = timeout_seconds
        _process.thread.judge.silent_seconds = silent_seconds
    elif timeout_seconds is not None:
        _process.thread = _Thread(strategy, timeout_seconds, silent_seconds)
        _process.thread.start()
        atexit.register(_process.thread.end)


def heartbeat(heartbeat_seconds: float | None) -> float | None:
    """Return what the user has given, here or in the environment, if anything.

    Raises:
        ValueError: for what is no time above 10 s.
    """
    return environment.seconds(
        "heartbeat_seconds", heartbeat_seconds, environment.HEARTBEAT, low=5 * PERIOD_SECONDS
    )


def lost_after(timeout_seconds: float | None, heartbeat_seconds: float | None) -> float | None:
    """After how many seconds without a sign of life TensorFlow itself may end a training.

    Only what has no watchdog any more: it says what happened, and at which step. So it speaks
    earlier, after half of `heartbeat_seconds` if they are given.

    Args:
        timeout_seconds: The watchdog's; `None` without one.
        heartbeat_seconds: What the user has given, if anything.

    Returns:
        The seconds; `None` for ever.
    """
    if heartbeat_seconds is not None or timeout_seconds is None:
        return heartbeat_seconds
    return min(timeout_seconds, SILENT_SECONDS) + 30.0


@contextmanager
def waiting_for_agreement(what: str) -> Iterator[None]:
    """Within this context, this worker waits for all others to do `what`."""
    _process.agreements += 1
    _process.waits = what[:_MAX_TEXT]
    try:
        yield
        _process.last = what[:_MAX_TEXT]
    finally:
        _process.waits = None


def begin_broadcast(what: str, size: int) -> None:
    """Note that this worker waits for all others to do `what`, and to take `size` bytes."""
    _process.waits, _process.broadcasts = what[:_MAX_TEXT], size


def end_broadcast() -> None:
    """Note that the broadcast is over, if there was one."""
    _process.waits, _process.broadcasts = None, None


def verdict_after_failure(error: str) -> str | None:
    """Say that the broadcast failed, and return what was found, if that is so within seconds."""
    _process.failed = f"{_process.waits}: {error}"[: 2 * _MAX_TEXT]
    end_broadcast()
    return _awaited_verdict()


def verdict_after_loss() -> str | None:
    """Say that a collective failed, and return what was found, if that is so within seconds."""
    _process.broken = True
    try:
        return _awaited_verdict()
    finally:
        _process.broken = False


def _awaited_verdict() -> str | None:
    watched = _process.thread is not None and _process.thread.is_alive()
    ends = time.monotonic() + (_FAILURE_SECONDS if watched else 0.0)
    while _process.verdict is None and time.monotonic() < ends:
        time.sleep(0.1)
    return _process.verdict


def verdict() -> str | None:
    """Return why the workers cannot go on, if that was found."""
    return _process.verdict


class _Thread(threading.Thread):
    """Reports, judges or asks the chief, and ends collectives."""

    def __init__(
        self, strategy: tf.distribute.Strategy, timeout_seconds: float, silent_seconds: float
    ):
        super().__init__(name="tf_redsync_watchdog", daemon=True)
        workers = collectives.worker_count(strategy)
        self._rank, self._tasks = collectives.worker_rank(strategy), groups.task_names(strategy)
        self._store = coordination.key_value_store()
        self._over = threading.Event()
        self._pid = os.getpid()
        self._now = 0.0
        self._tick = time.monotonic()
        ranks = range(workers) if self._rank == 0 else (0, self._rank)
        self.judge = StallDetector(
            ranks,
            timeout_seconds,
            lambda rank: coordination.answers(self._tasks[rank]),
            silent_seconds,
        )
        self._others = range(1, workers)

    def end(self) -> None:
        """At the end of the program: say so to the others."""
        if os.getpid() == self._pid:  # a forked process has no such thread
            self._over.set()
            self.join(_LINGER_SECONDS + PERIOD_SECONDS)

    @override
    def run(self):
        try:
            if self._rank == 0:
                self._lead()
            else:
                self._follow()
        except Exception as error:  # not for users: it is their program that counts
            _logger.debug("the watchdog ends: %s", error)

    def _clock(self) -> float:
        """Seconds that this thread has run: a pause of the process does not count."""
        before, self._tick = self._tick, time.monotonic()
        self._now += min(self._tick - before, 2 * PERIOD_SECONDS)
        return self._now

    def _lead(self) -> None:
        numbers = dict.fromkeys(self._others, 0)  # of the next report; none after the last one
        while True:
            over = self._over.is_set()
            own = _process.report(over)
            self.judge.hear(0, own, self._clock())
            told = {r: self._read(r, n) for r, n in numbers.items()}
            found = self.judge.verdict(self._clock())
            for text in self.judge.warnings(self._now).values():
                _logger.warning("%s", text)
            for rank, report in told.items():
                # The last word is an answer to what some have still to ask.
                if report is not None or found or over:
                    words = {"verdict": found, **vars(own)}
                    self._tell(f"answer/{rank}/{numbers[rank]}", words)
                if report is not None:
                    numbers[rank] += 1
                    if report.ended:
                        del numbers[rank]
            if found:
                time.sleep(_LINGER_SECONDS)
            if over:
                return
            if found:
                self._abort(found)
                return
            self._over.wait(PERIOD_SECONDS)

    def _read(self, rank: int, number: int) -> Report | None:
        """Return a worker's next report, if it is there."""
        key = f"report/{rank}/{number}"
        text = self._ask(key, _READ_SECONDS)
        if text is None:
            return None
        self._forget(key)
        report = Report.from_text(text)
        self.judge.hear(rank, report, self._clock())
        return report

    def _follow(self) -> None:
        number, pending, heard, chief = 0, False, self._clock(), Report()
        while True:
            over = self._over.is_set()
            own, now = _process.report(over), self._clock()
            self.judge.hear(self._rank, own, now)
            if over and pending:  # the last word is a report after one that is still to be read
                number, pending = number + 1, False
            if not pending and not chief.ended:
                pending = self._tell(f"report/{self._rank}/{number}", vars(own))
            if over:
                return
            text, found = None, None
            if pending:
                text = self._ask(f"answer/{self._rank}/{number}", PERIOD_SECONDS)
            if text is not None:
                self._forget(f"answer/{self._rank}/{number}")
                number, pending, heard = number + 1, False, self._clock()
                answer = json.loads(text)
                found, chief = answer.pop("verdict"), Report(**answer)
                self.judge.hear(0, chief, heard)
                if self._rank in (late := self.judge.warnings(heard)):  # the chief names others
                    _logger.warning("%s", late[self._rank])
            elif chief.ended or now - heard >= _ALONE_SECONDS:
                found = self.judge.verdict(now)
            if found:
                self._abort(found)
                return
            if not pending:  # reports are fresh when the chief reads them
                self._over.wait(PERIOD_SECONDS / 2)

    def _abort(self, found: str) -> None:
        _process.verdict = found
        _logger.error("%s", found)
        coordination.abort_collectives(found)
        self._end_without_data()

    def _end_without_data(self) -> None:
        """End the process if its step goes on waiting for data, which an abort does not end."""
        before, ends = _process.report(False), time.monotonic() + _STUCK_SECONDS
        while time.monotonic() < ends:
            if not before.lacks_data or _process.report(False) != before or not _in_a_step():
                return
            if self._over.wait(PERIOD_SECONDS):
                return
        _logger.critical("the input of this worker does not answer: its process ends")
        sys.stdout.flush()
        logging.shutdown()
        os._exit(1)

    def _tell(self, key: str, values: dict[str, Any]) -> bool:
        """Publish something; return whether the service took it."""
        try:
            self._store.set_config_key_value(f"{_PREFIX}/{key}", json.dumps(values))
        except tf.errors.OpError as error:
            _logger.debug("%s", error)
            return False
        return True

    def _ask(self, key: str, seconds: float) -> str | None:
        """Wait for what another worker publishes."""
        try:
            return self._store.get_config_key_value(f"{_PREFIX}/{key}", int(1000 * seconds))
        except tf.errors.DeadlineExceededError:
            return None
        except tf.errors.OpError as error:
            _logger.debug("%s", error)
            self._over.wait(seconds)
            return None

    def _forget(self, key: str) -> None:
        with contextlib.suppress(tf.errors.OpError):
            self._store.delete_config_key_value(f"{_PREFIX}/{key}")
