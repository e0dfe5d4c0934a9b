"""A worker on another machine, as the launcher sees it: an `ssh` process, and what it says."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from tf_redsync.cli.remote import MARK
from tf_redsync.cli.worker_process import Worker

_KILL_SECONDS = 5.0  # from SIGKILL for the worker to SIGKILL for its ssh
_POLL_SECONDS = 0.05


class HostError(OSError):
    """A host that cannot be used; the message names it and says what to do."""


class RemoteWorker(Worker):
    """A worker that `cli/remote.py` runs on another machine."""

    def __init__(
        self,
        index: int,
        host: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: Path | None,
        printer: Callable[[bytes], None] | None,
        append: bool = False,
    ):
        self.host = host
        self.where = f" on {host}"
        self._argv = list(argv)
        self._held = b""
        self._said: dict[str, Any] = {}
        self._kill_at: float | None = None
        super().__init__(index, argv, env, log, None, append, stdin=subprocess.PIPE)
        self._printer_then = printer  # once it has met; before, ssh and a shell talk

    def meet(self, seconds: float) -> None:
        """Waits until the other side answers.

        Raises:
            HostError: if it does not, or not in time.
        """
        end = time.monotonic() + seconds
        while "version" not in self._said:
            select.select([self.pipe], [], [], _POLL_SECONDS)
            at_end = self.read() == 0
            if "version" not in self._said and (at_end or self.ended()):
                self.wait()
                raise HostError(self._why_not())
            if time.monotonic() > end:
                raise HostError(
                    f"host {self.host} did not answer within {seconds:g} s. Does "
                    f"`{shlex.join(self._argv[:-1])} true` end at once?"
                )

    def begin(self, job: Mapping[str, Any]) -> None:
        """Has the worker started; see `cli/remote.py` for what it needs to know."""
        self._write(json.dumps(job))

    def _why_not(self) -> str:
        said = self.tail(5).strip() or "nothing was said"
        command, python = shlex.join(self._argv[:-1]), shlex.split(self._argv[-1])[-3]
        # Job reaps it, as it does all workers.
        status = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        code = status.si_status if status else 0
        if "No module named" in said:
            todo = f"tf_redsync is missing there for {python}: install it, or name another --python"
        elif code == 255:
            todo = f"it cannot be reached. `{command} true` has to work, without a password"
        elif code in (126, 127):
            todo = f"there is no {python} there. Name the interpreter with --python"
        else:
            todo = f"the launcher's part did not start there (exit code {code})"
        return f"host {self.host}: {todo}. It said: {said}"

    def _write(self, text: str) -> None:
        pipe = self.process.stdin
        assert pipe is not None
        with contextlib.suppress(OSError, ValueError):  # it is gone: its end tells more
            pipe.write(text.encode() + b"\n")
            pipe.flush()

    @override
    def received(self, data: bytes) -> None:
        """Takes the other side's own lines out of the worker's output."""
        text, self._held = self._held + data, b""
        while True:
            before, mark, after = text.partition(MARK[:1])
            super().received(before)
            line, newline, rest = after.partition(b"\n")
            if not mark:
                return
            whole = mark + after
            if whole.startswith(MARK) and newline:
                self._said |= json.loads(whole[len(MARK) :].partition(b"\n")[0])
                self._printer = self._printer_then
                text = rest
            elif whole.startswith(MARK) or MARK.startswith(whole):
                self._held = whole
                return
            else:  # the worker's own
                super().received(mark)
                text = after

    @override
    def send(self, number: int) -> None:
        if self.returncode is None:
            self._write(str(int(number)))
            if number == signal.SIGKILL and self._kill_at is None:
                self._kill_at = time.monotonic() + _KILL_SECONDS

    @override
    def ended(self) -> bool:
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            super().send(signal.SIGKILL)
        return super().ended()

    @override
    def wait(self) -> None:
        while not self.ended():
            self.read()
            time.sleep(_POLL_SECONDS)

    @override
    def finish(self) -> None:
        super().finish()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        if "ended" in self._said:
            self.returncode = self._said["ended"]
