"""A worker process: how it starts, what it prints, how it ends."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tf_redsync.cli import causes

KEPT_LINES = 400  # kept in memory per worker
_PR_SET_PDEATHSIG = 1
_DRAIN_READS = 64  # of 64 KiB: a pipe holds less, unless a process keeps writing into it
_LONGEST_LINE = 1 << 20  # bytes; a longer one is cut


@dataclasses.dataclass(frozen=True)
class WorkerResult:
    """How one worker ended.

    Attributes:
      index: task index in TF_CONFIG.
      returncode: exit code; `-s` if signal `s` ended the worker.
      output: its last lines (standard output and standard error together).
      killed: whether the launcher had to send SIGKILL.
      seconds: wall time from start to end.
    """

    index: int
    returncode: int
    output: str
    killed: bool
    seconds: float


@functools.cache
def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None, use_errno=True) if sys.platform.startswith("linux") else None


def before_exec(parent: int, cores: Sequence[int] | None) -> None:
    """In the child, before exec: the kernel kills it when the launcher dies, however it dies.

    Args:
      parent: the launcher.
      cores: those that the child may use; None for all that the launcher has.
    """
    if cores:
        os.sched_setaffinity(0, cores)
    libc = _libc()
    if libc is not None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the launcher died before prctl
            os._exit(1)


class Worker:
    """One process in a session of its own, and its output.

    Attributes:
      where: "" on this machine, else " on HOST".
    """

    where = ""

    def __init__(
        self,
        index: int,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: Path | None,
        printer: Callable[[bytes], None] | None,
        append: bool = False,
        cores: Sequence[int] | None = None,
        stdin: int = subprocess.DEVNULL,
    ):
        self.index = index
        self.returncode: int | None = None
        self.killed = False
        self.seconds = 0.0
        self._printer = printer
        self._partial = b""
        self._lines: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        self.failed_at: float | None = None  # when it printed its last traceback
        self._log = log.open("ab" if append else "wb") if log else None
        self._start = time.monotonic()
        _libc()  # loaded here, since between fork and exec only system calls are safe
        self.process = subprocess.Popen(
            list(argv),
            env=dict(env),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=functools.partial(before_exec, os.getpid(), cores),
        )
        assert self.process.stdout is not None
        self.pipe = self.process.stdout.fileno()
        os.set_blocking(self.pipe, False)

    def read(self) -> int:
        """Takes what is in the pipe, at most 64 KiB; returns the bytes read, 0 at its end.

        Returns -1 if the pipe is open and empty.
        """
        try:
            data = os.read(self.pipe, 1 << 16)
        except BlockingIOError:
            return -1
        self.received(data)
        return len(data)

    def received(self, data: bytes) -> None:
        """Takes output of the worker: to its log, and line by line."""
        if self._log:
            self._log.write(data)
            self._log.flush()
        head, newline, self._partial = (self._partial + data).rpartition(b"\n")
        self._take(head + newline)
        if len(self._partial) > _LONGEST_LINE:
            self._take(self._partial + b"\n")
            self._partial = b""

    def _take(self, lines: bytes) -> None:
        if lines:
            # A progress bar rewrites its line with "\r": only the last state is kept.
            text = lines.decode("utf-8", "replace").rstrip("\n")
            self._lines.extend(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
            if causes.TRACEBACK in text:
                self.failed_at = time.monotonic()
            if self._printer:
                self._printer(lines)

    def ended(self) -> bool:
        """Whether the process has ended. It stays a zombie, so its number is not given away."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.process.pid, flags) is not None

    def wait(self) -> None:
        """Returns when the process has ended, after SIGKILL was sent."""
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)

    def finish(self) -> None:
        """After the process has ended: ends its group, takes the rest of its output, reaps it."""
        self.send(signal.SIGKILL)
        for _ in range(_DRAIN_READS):
            if self.read() <= 0:
                break
        if self._partial:
            self._take(self._partial + b"\n")
        self.returncode = self.process.wait()
        self.seconds = time.monotonic() - self._start
        assert self.process.stdout is not None
        self.process.stdout.close()
        if self._log:
            self._log.close()

    def send(self, number: int) -> None:
        """Sends a signal to the worker's process group."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def tail(self, count: int) -> str:
        """Returns the last `count` lines."""
        return "\n".join(list(self._lines)[-count:])

    def result(self) -> WorkerResult:
        """Returns how the worker ended; only after `finish`."""
        assert self.returncode is not None
        output = self.tail(KEPT_LINES)
        return WorkerResult(self.index, self.returncode, output, self.killed, self.seconds)
