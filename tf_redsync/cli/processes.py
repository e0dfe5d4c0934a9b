"""Worker processes of one attempt: start, output, supervision, signals, time limits.

This module knows processes, but not TF_CONFIG. `launch.py` is the interface.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import functools
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from tf_redsync import stopping
from tf_redsync.cli import output, root_cause

KEPT_LINES = 400  # kept in memory per worker
_KEPT_CHARACTERS = 8 << 20  # kept in memory per worker, or one line if that is longer
_PR_SET_PDEATHSIG = 1
_DRAIN_READS = 64  # reads of 64 KiB; a pipe holds less, unless a process keeps writing into it
_LONGEST_LINE = 1 << 20  # bytes; longer lines are split


@dataclasses.dataclass(frozen=True)
class WorkerResult:
    """Result of one worker.

    Attributes:
        index: Rank of the worker.
        returncode: Exit code; `-s` if signal `s` ended the worker.
        output: The last lines of its standard output and standard error.
        killed: Whether the launcher sent SIGKILL.
        seconds: Wall time from start to end, in seconds.
    """

    index: int
    returncode: int
    output: str
    killed: bool
    seconds: float


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def before_exec(parent: int, cores: Sequence[int] | None) -> None:
    """Tie the child to its parent and cores; runs in the child before exec.

    The kernel kills the child when the launcher dies, even by SIGKILL.

    Args:
        parent: Process ID of the launcher.
        cores: Cores that the child may use; `None` for those of the launcher.
    """
    if cores:
        os.sched_setaffinity(0, cores)
    _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the launcher died before prctl
        os._exit(1)


def spawn(
    argv: Sequence[str],
    env: Mapping[str, str],
    cores: Sequence[int] | None,
    stdin: int = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Start a process in its own session that ends with this one, with its output in a pipe."""
    _libc()  # loaded here, since between fork and exec only system calls are safe
    return subprocess.Popen(
        list(argv),
        env=dict(env),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=functools.partial(before_exec, os.getpid(), cores),
    )


class Worker:
    """A worker process in its own session, and its output.

    The constructor uses `process`, or starts a new one. `printer` receives complete lines, and
    `stream` all output as it arrives. The worker appends its lines to `log`; `attempt` is the
    number of restarts so far.

    Attributes:
        where: "" on this machine, else " on HOST", for messages.
    """

    where = ""

    def __init__(
        self,
        index: int,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: Path | None,
        printer: Callable[[bytes], None] | None,
        attempt: int = 0,
        cores: Sequence[int] | None = None,
        stdin: int = subprocess.DEVNULL,
        process: subprocess.Popen[bytes] | None = None,
        stream: Callable[[bytes], None] | None = None,
    ):
        self.index = index
        self.returncode: int | None = None
        self.killed = False
        self.seconds = 0.0
        self._printer = printer
        self._stream = stream
        self._partial = b""
        self._interrupted = False
        self._errs = False  # has printed an error after the interrupt
        self._lines: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        self.failed_at: float | None = None  # time of its last traceback
        self._log = self._open(log, attempt) if log else None
        self._start = time.monotonic()
        self.process = process or spawn(argv, env, cores, stdin)
        assert self.process.stdout is not None
        self.pipe = self.process.stdout.fileno()
        os.set_blocking(self.pipe, False)

    def read(self) -> int:
        """Read at most 64 KiB from the pipe.

        Returns:
            The number of bytes read; 0 at the end of the pipe, -1 if it is open and empty.
        """
        try:
            data = os.read(self.pipe, 1 << 16)
        except BlockingIOError:
            return -1
        self.received(data)
        return len(data)

    def _open(self, log: Path, attempt: int) -> IO[bytes] | None:
        try:
            file = log.open("ab", buffering=0)  # so that another program may truncate the file
            if os.fstat(file.fileno()).st_size:
                now = time.strftime("%Y-%m-%d %H:%M:%S")
                file.write(f"\n--- {now}, attempt {attempt + 1} ---\n".encode())
            return file
        except OSError as error:
            self._say_unwritable(log, error)
            return None

    def _say_unwritable(self, log: object, error: OSError) -> None:
        output.say(
            f"worker {self.index}: {log} cannot be written and ends here: {error}. "
            "The worker goes on."
        )

    def _write_to_log(self, data: bytes) -> None:
        """Write output to the log file; after an error the log ends and the worker continues."""
        if self._log is None:
            return
        try:
            self._log.write(data)
        except OSError as error:
            self._say_unwritable(self._log.name, error)
            self._log.close()
            self._log = None

    def received(self, data: bytes) -> None:
        """Write complete lines to the log file and pass them on."""
        if self._stream and data:
            self._stream(data)
        head, newline, self._partial = (self._partial + data).rpartition(b"\n")
        self._take_lines(head + newline)
        if len(self._partial) > _LONGEST_LINE:
            self._take_lines(self._partial + b"\n")
            self._partial = b""

    def _take_lines(self, lines: bytes) -> None:
        if lines:
            # A progress bar rewrites its line with "\r": only the last state is kept.
            kept = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines[:-1].split(b"\n")]
            lines = b"\n".join([*kept, b""])
            self._write_to_log(lines)
            text = lines.decode("utf-8", "replace")
            self._lines.extend(text[:-1].split("\n"))
            while len(self._lines) > 1 and sum(map(len, self._lines)) > _KEPT_CHARACTERS:
                self._lines.popleft()
            if root_cause.TRACEBACK in root_cause.plain(text):
                self.failed_at = time.monotonic()
            if self._printer:
                self._printer(self._before_errors(lines) if self._interrupted else lines)

    def interrupt(self) -> None:
        """Stop printing error messages and tracebacks, which the interrupt causes."""
        self._interrupted = True

    def _before_errors(self, lines: bytes) -> bytes:
        shown = b""
        for line in lines.splitlines(keepends=True):
            self._errs = self._errs or output.is_error(line)
            shown += b"" if self._errs else line
        return shown

    def ended(self) -> bool:
        """Return whether the process has ended. It stays a zombie, which keeps its process ID."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.process.pid, flags) is not None

    def wait(self) -> None:
        """Block until the process has ended; call it after SIGKILL."""
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)

    def finish(self) -> None:
        """Kill the ended process's group, read its remaining output and reap it."""
        self.send(signal.SIGKILL)
        for _ in range(_DRAIN_READS):
            if self.read() <= 0:
                break
        if self._partial:
            self._take_lines(self._partial + b"\n")
        self.returncode = self.process.wait()
        self.seconds = time.monotonic() - self._start
        assert self.process.stdout is not None
        self.process.stdout.close()
        if self._log:
            self._log.close()

    def send(self, number: int) -> None:
        """Send a signal to the worker's process group."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def tail(self, count: int) -> str:
        """Return the last `count` lines."""
        return "\n".join(list(self._lines)[-count:])

    def result(self) -> WorkerResult:
        """Return the worker's result; call it after `finish`."""
        assert self.returncode is not None
        output = self.tail(KEPT_LINES)
        return WorkerResult(self.index, self.returncode, output, self.killed, self.seconds)


TAIL_LINES = 20  # last lines of a failed worker that are printed
TIMEOUT_EXIT_CODE = 124  # like timeout(1)
PREPARE_SECONDS = 60.0  # delay of the spares' imports, so that they do not slow down the start
_POLL_SECONDS = 0.05


@dataclasses.dataclass(frozen=True)
class LaunchResult:
    """Result of a job.

    Attributes:
        workers: One `WorkerResult` per worker, in task order; empty if the job was cancelled before
            they began.
        exit_code: 0 if all workers finished, also after SIGTERM or SIGUSR1. 75 if they stopped with
            a checkpoint on request, 124 after the timeout, 128 + s if signal `s` interrupted the
            launcher. Else the code of the first failing worker (128 + s if signal `s` ended it).
        message: The error, with the failing worker's last lines, or why the job ended early.
            Empty after success.
        restarts: Number of restarts.
        first_failed: Position in `workers` of the worker that failed first; `None` if no worker has
            failed, or only after the launcher began to end the job.
        cause: A line with the first failure; empty if no worker has failed.
        interrupted: Whether a signal or the timeout ended the job.
    """

    workers: tuple[WorkerResult, ...]
    exit_code: int
    message: str
    restarts: int = 0
    first_failed: int | None = None
    cause: str = ""
    interrupted: bool = False

    @property
    def failed(self) -> bool:
        """Whether a worker has failed by itself."""
        return self.first_failed is not None


@dataclasses.dataclass(frozen=True)
class TimeLimits:
    """Time limits of a job.

    Attributes:
        timeout: Seconds from `start` until the job is ended; `None` for no limit.
        grace: Seconds between the failure of a worker and SIGKILL for the others.
        stop_grace: Seconds for a checkpoint after SIGTERM, SIGUSR1 or the timeout, then SIGKILL.
        start: Start of the timeout, by `time.monotonic()`.
    """

    timeout: float | None
    grace: float
    stop_grace: float
    start: float = dataclasses.field(default_factory=time.monotonic)


class Cancelled(Exception):
    """A signal or the timeout ends a job before its workers begin."""

    def __init__(self, why: str, exit_code: int):
        super().__init__(f"{why}: no worker is started.")
        self.exit_code = exit_code


class Job:
    """The workers of one attempt, with supervision and time limits.

    It calls `prepare` for the next attempt once: `PREPARE_SECONDS` after its start, or at the first
    failure. It calls `watch` with itself many times a second.
    """

    def __init__(
        self,
        limits: TimeLimits,
        echo: bool,
        signals: collections.deque[int],
        prepare: Callable[[], None] | None = None,
        watch: Callable[[Job], None] | None = None,
    ):
        self._watch = watch
        self._prepare = prepare
        self._prepare_at = time.monotonic() + PREPARE_SECONDS
        self._limits = limits
        self._echo = echo
        self._deadline = None if limits.timeout is None else limits.start + limits.timeout
        self._kill_at: float | None = None
        self._workers: list[Worker] = []
        self._alive: list[Worker] = []
        self._selector = selectors.DefaultSelector()
        self._messages: list[str] = []
        self._exit_code = 0
        self._failed: list[root_cause.Failure] = []
        self._signals = signals  # signals that the launcher has received
        self._asked_at: float | None = None  # time of the last request for a checkpoint
        self._ending = False  # whether a signal or the timeout, not a failed worker, ends the job

    def add(self, worker: Worker) -> None:
        """Add a started worker."""
        self._workers.append(worker)
        self._alive.append(worker)
        self._selector.register(worker.pipe, selectors.EVENT_READ, worker)

    def check(self) -> None:
        """Raise `Cancelled` after a signal or the timeout; call it while workers cannot begin."""
        if self._signals:
            number = self._signals.popleft()
            raise Cancelled(signal.Signals(number).name, 128 + number)
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise Cancelled(f"timeout of {self._limits.timeout:g} s", TIMEOUT_EXIT_CODE)

    def supervise(self) -> LaunchResult:
        """Wait until all workers have ended; return the result."""
        while self._alive:
            for key, _ in self._selector.select(_POLL_SECONDS):
                if not key.data.read():
                    self._selector.unregister(key.fd)
            for worker in [worker for worker in self._alive if worker.ended()]:
                self._finish(worker)
                self._handle_end(worker)
            self._clock(time.monotonic())
        codes = [worker.returncode for worker in self._workers]
        if self._exit_code - 128 in stopping.SIGNALS and not any(codes):
            self._exit_code = 0  # the workers have finished in spite of the signal
        first = root_cause.first_failure(self._failed)
        if first is not None:
            self.say(first[1])
        if self._exit_code == 128 + signal.SIGINT:
            self._print_places()
        results = tuple(worker.result() for worker in self._workers)
        numbers = [worker.index for worker in self._workers]
        return LaunchResult(
            results,
            self._exit_code,
            "\n".join(self._messages),
            first_failed=None if first is None or self._ending else numbers.index(first[0]),
            cause="" if first is None else first[1],
            interrupted=self._ending,
        )

    def _print_places(self) -> None:
        """Print, for each worker that raised after an interrupt, the line of the user's program."""
        places = [(w.index, root_cause.place(w.tail(KEPT_LINES))) for w in self._workers]
        shown = ", ".join(f"worker {index} at {place}" for index, place in places if place)
        if shown:
            self.say(f"interrupted: {shown}. Log files (--log-dir) have the tracebacks.")

    @property
    def failing(self) -> bool:
        """Whether a worker has failed by itself."""
        return bool(self._failed) and not self._ending

    @property
    def processes(self) -> list[int]:
        """The process IDs of the workers that have not ended."""
        return [worker.process.pid for worker in self._alive]

    def end(self, seconds: float, why: str) -> None:
        """Give the workers some seconds to end by themselves, then send SIGKILL."""
        if self._alive:
            self.say(f"{why}: {self._names()} must end, SIGKILL in {seconds:g} s.")
            self._kill_within(seconds)

    def _finish(self, worker: Worker) -> None:
        self._alive.remove(worker)
        if worker.pipe in self._selector.get_map():
            self._selector.unregister(worker.pipe)
        worker.finish()

    def _handle_end(self, worker: Worker) -> None:
        """Report a worker's end; of failures only the first, since the others follow from it."""
        code = worker.returncode or 0
        if not code or worker.killed:
            return
        if code == stopping.EXIT_CODE and not self._failed:
            self._stopped(worker)
        elif not self._exit_code or self._failed:
            at = worker.failed_at or time.monotonic()
            self._failed.append(root_cause.Failure(worker.index, code, worker.tail(KEPT_LINES), at))
            if len(self._failed) == 1:
                self._report(worker, code)

    def _stopped(self, worker: Worker) -> None:
        if self._exit_code not in (stopping.EXIT_CODE, TIMEOUT_EXIT_CODE):
            self._exit_code = stopping.EXIT_CODE
            self.say(f"worker {worker.index} stopped on request: exit code {self._exit_code}.")
            self._kill_within(self._limits.stop_grace)

    def _report(self, worker: Worker, code: int) -> None:
        self._exit_code = 128 - code if code < 0 else code
        ending = f"was ended by {root_cause.signal_name(-code)}" if code < 0 else "failed"
        tail = worker.tail(TAIL_LINES).replace("\n", "\n    ")
        self.say(
            f"worker {worker.index}{worker.where} {ending}: exit code {self._exit_code}. "
            f"Its last {TAIL_LINES} lines:\n    {tail or '(no output)'}"
        )
        if self._alive:
            self.say(f"{self._names()} must end, SIGKILL in {self._limits.grace:g} s.")
            self._kill_within(self._limits.grace)

    def _clock(self, now: float) -> None:
        if self._watch:
            self._watch(self)
        if self._prepare and (self._failed or (now >= self._prepare_at and not self._exit_code)):
            prepare, self._prepare = self._prepare, None
            prepare()
        while self._signals:
            number = self._signals.popleft()
            asks = number in stopping.SIGNALS
            if asks and self._asked_at is not None:  # the rule of `stopping.StopSignals`
                if number == signal.SIGUSR1 or now - self._asked_at < stopping.SAME_SECONDS:
                    continue
            self._asked_at = now if asks else self._asked_at
            if self._kill_at is None:
                self.say(f"{signal.Signals(number).name}: forwarded to {self._names()}.")
            grace = self._limits.stop_grace if asks else self._limits.grace
            self._stop(128 + number, number, grace if self._kill_at is None else 0)
        if self._deadline is not None and now >= self._deadline and self._alive:
            self._deadline = None
            self.say(f"timeout: {self._names()} still running after {self._limits.timeout:g} s.")
            self._stop(TIMEOUT_EXIT_CODE, signal.SIGTERM, self._limits.stop_grace)
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
            if number == signal.SIGINT:
                worker.interrupt()
            worker.send(number)
        self._kill_within(grace)

    def _kill_within(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        self._kill_at = at if self._kill_at is None else min(at, self._kill_at)

    def _names(self) -> str:
        names = ", ".join(str(worker.index) for worker in self._alive)
        return f"worker{'s' if len(self._alive) > 1 else ''} {names}"

    def say(self, message: str) -> None:
        """Print a message and add it to the result."""
        self._messages.append(message)
        if self._echo:
            output.say(message)

    def kill_all(self) -> None:
        """Send SIGKILL to the process group of every worker that is not reaped."""
        for worker in self._alive:
            worker.send(signal.SIGKILL)

    def close(self) -> None:
        """Kill and reap all processes."""
        self.kill_all()
        for worker in list(self._alive):
            worker.wait()
            self._finish(worker)
        self._selector.close()
