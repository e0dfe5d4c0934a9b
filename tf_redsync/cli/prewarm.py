"""Spare processes of the launcher, which have imported TensorFlow before a restart needs them.

A spare becomes a worker of the next attempt: it keeps its process ID, output, session and cores.
`spare.py` is the program that it runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from typing_extensions import Self

from tf_redsync.cli import processes

PROGRAM = str(Path(__file__).with_name("spare.py"))


class Spares:
    """The spare processes for the next attempt, by place."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[subprocess.Popen[bytes], Sequence[int] | None]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(
        self, place: int, words: Sequence[str], env: Mapping[str, str], cores: Sequence[int] | None
    ) -> None:
        """Start a spare; without one, the restart starts a new process.

        Args:
            place: Place of the worker.
            words: Its command line after the interpreter.
            env: Its environment, except for the variables of an attempt.
            cores: Its cores; `None` for all.
        """
        with contextlib.suppress(OSError):
            command = [sys.executable, PROGRAM, *words]
            self._waiting[place] = processes.spawn(command, env, cores, subprocess.PIPE), cores

    def take(
        self, place: int, variables: Mapping[str, str], cores: Sequence[int] | None
    ) -> subprocess.Popen[bytes] | None:
        """Let a spare become a worker.

        Args:
            place: Place of the worker.
            variables: Variables of the attempt.
            cores: Cores of the worker, which must equal the spare's, since libraries have counted
                them.

        Returns:
            The process; `None` if no spare has these cores, or it has ended.
        """
        process, spare_cores = self._waiting.pop(place, (None, None))
        if process is None:
            return None
        assert process.stdin is not None
        if spare_cores == cores and process.poll() is None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(dict(variables)).encode() + b"\n")
                process.stdin.close()
                return process
        _end(process)
        return None

    def close(self) -> None:
        """End all spares that did not become workers."""
        while self._waiting:
            _end(self._waiting.popitem()[1][0])


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:  # else another process may have its ID
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def can_run(command: Sequence[str]) -> bool:
    """Return whether a spare can run a command, which is a script or module of this interpreter."""
    if len(command) < 2 or command[0] != sys.executable:
        return False
    if command[1] == "-m":
        return len(command) > 2
    return command[1].endswith(".py") and Path(command[1]).is_file()
