"""Worker processes and their supervision: output, failure, timeout, signals, SIGKILL.

`tf_redsync.launch` is the interface; this module knows processes, but no TF_CONFIG.
"""

from __future__ import annotations

import collections
import dataclasses
import selectors
import signal
import time

from tf_redsync import stopping
from tf_redsync.cli import causes, output
from tf_redsync.cli.worker_process import KEPT_LINES, Worker, WorkerResult

TAIL_LINES = 20  # shown of a worker that failed
TIMEOUT_EXIT_CODE = 124  # as timeout(1)
_POLL_SECONDS = 0.05


@dataclasses.dataclass(frozen=True)
class LaunchResult:
    """How a job ended.

    Attributes:
      workers: one `WorkerResult` per worker, in task order.
      exit_code: 0, or the first failing worker's code (128 + s if signal `s` ended it), 124 after
        the timeout, 128 + s if the launcher was interrupted by signal `s`, or 75 if the workers
        then have stopped with a checkpoint.
      message: what went wrong, with the failing worker's last lines; empty after success.
      restarts: how often the job was started again.
      first_failed: which of the workers failed of itself, before the others, if one did and the job
        was not being ended.
    """

    workers: tuple[WorkerResult, ...]
    exit_code: int
    message: str
    restarts: int = 0
    first_failed: int | None = None

    @property
    def failed(self) -> bool:
        """Whether a worker has failed, and not the job been stopped."""
        return self.first_failed is not None


@dataclasses.dataclass(frozen=True)
class Ends:
    """When a job ends that does not of itself.

    Attributes:
      timeout: seconds from here on; None for no limit.
      grace: seconds between the failure of a worker and SIGKILL for the others.
      stop_grace: seconds between SIGTERM or SIGUSR1 and SIGKILL.
      start: from where `timeout` counts.
    """

    timeout: float | None
    grace: float
    stop_grace: float
    start: float = dataclasses.field(default_factory=time.monotonic)


class Job:
    """The workers of one run and the clock that ends them."""

    def __init__(self, ends: Ends, echo: bool, signals: collections.deque[int]):
        self._ends = ends
        self._echo = echo
        self._deadline = None if ends.timeout is None else ends.start + ends.timeout
        self._kill_at: float | None = None
        self._workers: list[Worker] = []
        self._alive: list[Worker] = []
        self._selector = selectors.DefaultSelector()
        self._messages: list[str] = []
        self._exit_code = 0
        self._failed: list[causes.End] = []
        self._signals = signals  # as they come to the launcher
        self._asked_at: float | None = None  # when one asked for a checkpoint
        self._ending = False  # for another reason than a worker that failed

    def add(self, worker: Worker) -> None:
        """Takes a started worker under supervision."""
        self._workers.append(worker)
        self._alive.append(worker)
        self._selector.register(worker.pipe, selectors.EVENT_READ, worker)

    def supervise(self) -> LaunchResult:
        """Returns when all workers have ended, of themselves or by SIGKILL."""
        while self._alive:
            for key, _ in self._selector.select(_POLL_SECONDS):
                if not key.data.read():
                    self._selector.unregister(key.fd)
            for worker in [worker for worker in self._alive if worker.ended()]:
                self._finish(worker)
                self._after(worker)
            self._clock(time.monotonic())
        first = causes.first(self._failed)
        if first is not None:
            self.say(first[1])
        results = tuple(worker.result() for worker in self._workers)
        numbers = [worker.index for worker in self._workers]
        return LaunchResult(
            results,
            self._exit_code,
            "\n".join(self._messages),
            first_failed=None if first is None or self._ending else numbers.index(first[0]),
        )

    def _finish(self, worker: Worker) -> None:
        self._alive.remove(worker)
        if worker.pipe in self._selector.get_map():
            self._selector.unregister(worker.pipe)
        worker.finish()

    def _after(self, worker: Worker) -> None:
        """The first end but success is the one reported: the others end because of it."""
        code = worker.returncode or 0
        if not code or worker.killed:
            return
        if code == stopping.EXIT_CODE and not self._failed:
            self._stopped(worker)
        elif not self._exit_code or self._failed:
            at = worker.failed_at or time.monotonic()
            self._failed.append(causes.End(worker.index, code, worker.tail(KEPT_LINES), at))
            if len(self._failed) == 1:
                self._report(worker, code)

    def _stopped(self, worker: Worker) -> None:
        if self._exit_code not in (stopping.EXIT_CODE, TIMEOUT_EXIT_CODE):
            self._exit_code = stopping.EXIT_CODE
            self.say(f"worker {worker.index} has stopped on request: exit code {self._exit_code}.")
            self._kill_within(self._ends.stop_grace)

    def _report(self, worker: Worker, code: int) -> None:
        self._exit_code = 128 - code if code < 0 else code
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else "failed"
        tail = worker.tail(TAIL_LINES).replace("\n", "\n    ")
        self.say(
            f"worker {worker.index}{worker.where} {how}: exit code {self._exit_code}. "
            f"Its last {TAIL_LINES} lines:\n    {tail or '(no output)'}"
        )
        if self._alive:
            self.say(f"{self._names()} may go on for {self._ends.grace:g} s, then SIGKILL.")
            self._kill_within(self._ends.grace)

    def _clock(self, now: float) -> None:
        while self._signals:
            number = self._signals.popleft()
            asks = number in stopping.SIGNALS
            if asks and self._asked_at is not None and now - self._asked_at < stopping.SAME_SECONDS:
                continue
            self._asked_at = now if asks else self._asked_at
            if self._kill_at is None:
                self.say(f"{signal.Signals(number).name}: passed on to {self._names()}.")
            grace = self._ends.stop_grace if asks else self._ends.grace
            self._stop(128 + number, number, grace if self._kill_at is None else 0)
        if self._deadline is not None and now >= self._deadline and self._alive:
            self._deadline = None
            self.say(f"timeout: {self._names()} still running after {self._ends.timeout:g} s.")
            self._stop(TIMEOUT_EXIT_CODE, signal.SIGTERM, self._ends.grace)
        if self._kill_at is not None and now >= self._kill_at and self._alive:
            self.say(f"{self._names()} did not end: killed by SIGKILL.")
            for worker in self._alive:
                worker.killed = True
            self._kill_at = None
            self.kill_all()

    def _stop(self, exit_code: int, number: int, grace: float) -> None:
        self._ending = True
        self._exit_code = self._exit_code or exit_code
        for worker in self._alive:
            worker.send(number)
        self._kill_within(grace)

    def _kill_within(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        self._kill_at = at if self._kill_at is None else min(at, self._kill_at)

    def _names(self) -> str:
        names = ", ".join(str(worker.index) for worker in self._alive)
        return f"worker{'s' if len(self._alive) > 1 else ''} {names}"

    def say(self, message: str) -> None:
        """Prints a line, and keeps it for the result."""
        self._messages.append(message)
        if self._echo:
            output.say(message)

    def kill_all(self) -> None:
        """SIGKILL to the group of every worker that has not been reaped."""
        for worker in self._alive:
            worker.send(signal.SIGKILL)

    def close(self) -> None:
        """End all processes, whatever happened before."""
        self.kill_all()
        for worker in list(self._alive):
            worker.wait()
            self._finish(worker)
        self._selector.close()
