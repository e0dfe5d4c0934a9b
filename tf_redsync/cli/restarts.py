"""When a job that has failed starts again, and with which workers."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from tf_redsync.cli.processes import Job, LaunchResult

AT_ONCE_SECONDS = 60.0


@dataclasses.dataclass
class Restarts:
    """Decides after each attempt.

    A job starts again with the workers that it had. One is left out when it cannot be started, or
    when it fails first in two attempts in a row and the second time within `AT_ONCE_SECONDS` of the
    start, as long as `min_workers` are left.

    Attributes:
        left: How many restarts there may still be.
        min_workers: With how many workers the job may go on.
        places: Numbers, from 0, of the places that workers are started in: with its own wrapper,
            environment and address, each.
        attempt: How often the job was started again.
    """

    left: int
    min_workers: int
    places: list[int]
    attempt: int = 0
    _suspect: int | None = None  # the place that failed first in the last attempt

    def again(self, first: int | None, seconds: float) -> str | None:
        """Return in words how the job goes on after a failure; `None` if it does not.

        Args:
            first: Index of the worker that failed first, if that is known.
            seconds: How long the attempt took.
        """
        if not self.left:
            return None
        place = None if first is None else self.places[first]
        at_once = place is not None and place == self._suspect and seconds < AT_ONCE_SECONDS
        self._suspect = place
        if at_once and len(self.places) > self.min_workers:
            return self._without(place, f"worker {first} has failed first twice, at once")
        return self._next("")

    def without(self, place: int, why: str) -> str | None:
        """Return in words how the job goes on without a place; `None` if it does not."""
        if not self.left or len(self.places) <= self.min_workers:
            return None
        return self._without(place, why)

    def _without(self, place: int | None, why: str) -> str:
        self.places = [other for other in self.places if other != place]
        self._suspect = None
        return self._next(f" without it: {why}")

    def _next(self, how: str) -> str:
        self.left -= 1
        self.attempt += 1
        workers = f"{len(self.places)} worker{'s' if len(self.places) > 1 else ''}"
        return f"restart {self.attempt} with {workers}{how}; {self.left} left."


class NotStarted(Exception):
    """A worker could not be started in some place."""

    def __init__(self, place: int, error: OSError):
        super().__init__(str(error))
        self.place = place
        self.error = error


def run_attempts(
    make: Callable[[], Job], start: Callable[[Job], None], restarts: Restarts
) -> LaunchResult:
    """Runs a job until it succeeds, stops on request, or may not start again.

    Args:
        make: Makes the job of an attempt, without workers.
        start: Starts them.
        restarts: Decides.

    Raises:
        OSError: if a worker cannot be started, and the job must not go on without it.
    """
    messages: list[str] = []
    while True:
        job, began, result = make(), time.monotonic(), None
        try:
            start(job)
            result = job.supervise()
            messages.append(result.message)
            seconds = time.monotonic() - began
            how = restarts.again(result.first_failed, seconds) if result.failed else None
        except NotStarted as missing:
            how = restarts.without(missing.place, str(missing))
            if how is None:
                raise missing.error from None
        finally:
            job.close()
        if how is not None:
            job.say(how)
            messages.append(how)
        elif result is not None:
            message = "\n".join(text for text in messages if text)
            return dataclasses.replace(result, message=message, restarts=restarts.attempt)
