"""Restarts of a failed job, and the choice of workers for them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from tf_redsync import stopping
from tf_redsync.cli.processes import Cancelled, Job, LaunchResult

AT_ONCE_SECONDS = 60.0
# Seconds before the restart after one, two, and more short attempts in a row: a file server that
# stalls or a port that is still in use would otherwise cost all restarts within seconds.
PAUSES: tuple[float, ...] = (1.0, 5.0, 15.0)
SHORT_SECONDS = 20.0  # an attempt that fails earlier is short
_POLL_SECONDS = 0.05


@dataclasses.dataclass
class Restarts:
    """Restart policy of a job.

    A job restarts with the same workers. A worker is excluded if it cannot be started, or if it
    fails first in two attempts in a row and the second time within `AT_ONCE_SECONDS` of the start.
    At least `min_workers` remain.

    Attributes:
        left: Number of restarts left.
        min_workers: Minimum number of workers.
        places: Indices, from 0, of the places that workers are started in. Each place has its own
            wrapper, environment and address.
        attempt: Number of restarts so far.
    """

    left: int
    min_workers: int
    places: list[int]
    attempt: int = 0
    _suspect: int | None = None  # the place that failed first in the last attempt
    _short: int = 0  # number of short attempts in a row

    def again(self, first: int | None, seconds: float) -> str | None:
        """Return a message about the restart after a failure; `None` for no restart.

        Args:
            first: Rank of the worker that failed first; `None` if unknown.
            seconds: Duration of the attempt.
        """
        if not self.left:
            return None
        place = None if first is None else self.places[first]
        at_once = place is not None and place == self._suspect and seconds < AT_ONCE_SECONDS
        self._suspect = place
        if at_once and len(self.places) > self.min_workers:
            return self._drop_place(place, f"worker {first} has failed first twice, at the start")
        return self._begin_attempt("")

    def not_started(self, place: int, why: str) -> str | None:
        """Return a message about the restart if a place has no worker; `None` for no restart.

        The restart excludes the place, or tries all again if none may be excluded. Then the first
        attempt is not repeated, because its cause is probably a wrong argument.
        """
        if not self.left:
            return None
        if len(self.places) > self.min_workers:
            return self._drop_place(place, why)
        return self._begin_attempt(f": {why}") if self.attempt else None

    def pause(self, seconds: float) -> float:
        """Return the seconds to wait before the restart after an attempt of some seconds."""
        self._short = self._short + 1 if seconds < SHORT_SECONDS else 0
        return PAUSES[min(self._short, len(PAUSES)) - 1] if self._short and PAUSES else 0.0

    def _drop_place(self, place: int | None, why: str) -> str:
        self.places = [other for other in self.places if other != place]
        self._suspect = None
        return self._begin_attempt(f" without it: {why}")

    def _begin_attempt(self, suffix: str) -> str:
        self.left -= 1
        self.attempt += 1
        workers = f"{len(self.places)} worker{'s' if len(self.places) > 1 else ''}"
        return f"restart {self.attempt} with {workers}{suffix}; {self.left} left."


class NotStarted(Exception):
    """A worker cannot be started in its place."""

    def __init__(self, place: int, error: OSError):
        super().__init__(str(error))
        self.place = place
        self.error = error


def run_attempts(
    make: Callable[[], Job], start: Callable[[Job], None], restarts: Restarts
) -> LaunchResult:
    """Run a job until it succeeds, stop on request, or may not restart.

    Args:
        make: Returns the job of an attempt, before its workers are started.
        start: Starts the workers of a job.
        restarts: Restart policy.

    Raises:
        OSError: a worker cannot be started, and the job must not run without it.
    """
    messages: list[str] = []
    pause = 0.0
    while True:
        job, began, result = make(), time.monotonic(), None
        try:
            _wait(pause, job.check)
            began = time.monotonic()
            start(job)
            result = job.supervise()
            messages.append(result.message)
            seconds = time.monotonic() - began
            notice = restarts.again(result.first_failed, seconds) if result.failed else None
        except NotStarted as missing:
            seconds = time.monotonic() - began
            notice = restarts.not_started(missing.place, str(missing))
            if notice is None:
                raise missing.error from None
        except Cancelled as early:
            job.say(str(early))
            messages.append(str(early))
            code = early.exit_code
            if restarts.attempt and code - 128 in stopping.SIGNALS:  # a job that has run
                code = stopping.EXIT_CODE
            notice, result = None, LaunchResult((), code, "", interrupted=True)
        finally:
            job.close()
        if notice is not None:
            pause = restarts.pause(seconds)
            notice += f" It begins in {pause:g} s." if pause else ""
            job.say(notice)
            messages.append(notice)
        elif result is not None:
            message = "\n".join(text for text in messages if text)
            return dataclasses.replace(result, message=message, restarts=restarts.attempt)


def _wait(seconds: float, check: Callable[[], None]) -> None:
    """Wait, and call `check` many times per second; it may raise."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        check()
        time.sleep(_POLL_SECONDS)
