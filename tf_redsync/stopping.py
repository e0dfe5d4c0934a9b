"""SIGTERM and SIGUSR1: a scheduler asks this process to stop, with some time left to save.

Knows signals and the exit code, but neither training nor checkpoints. A callback listens while
`fit` runs, asks `requested` after each step, has the workers agree, saves, and raises `Stopped`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from types import FrameType
from typing import Any

# EX_TEMPFAIL of sysexits.h: "a temporary failure; the user is invited to retry". No failure of
# Python (1, 2), of a shell (126, 127), of timeout(1) (124), of a signal (128 and more).
EXIT_CODE = 75
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# A scheduler may signal every process of a job, and the launcher passes on what it gets.
SAME_SECONDS = 5.0
_logger = logging.getLogger("tf_redsync")


class Stopped(SystemExit):
    """The training has stopped on request, with a checkpoint: the program ends by `EXIT_CODE`.

    No `Exception`: what catches the errors of a training lets it pass.
    """

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


class Requests:
    """What SIGTERM and SIGUSR1 ask for, between `listen` and `close`.

    The first one is a request. Another one, `SAME_SECONDS` later or more, ends the process at once,
    by 128 + its number, also while the main thread waits in TensorFlow, where no handler of Python
    runs: signals come through a file to a thread of its own.
    """

    def __init__(self) -> None:
        self._requested: str | None = None
        self._since = 0.0
        self._before: dict[int, Any] = {}
        self._file = -1  # of who listened before
        self._sockets: tuple[socket.socket, socket.socket] | None = None

    @property
    def requested(self) -> str | None:
        """The name of the signal that has asked for the end, or `None`."""
        return self._requested

    def listen(self) -> None:
        """Take over the signals; outside of the main thread, where Python cannot, warn.

        A signal that came before the last `close` is still a request.
        """
        if self._sockets is not None:
            return
        if threading.current_thread() is not threading.main_thread():
            _logger.warning(
                "`fit` does not run in the main thread, so SIGTERM and SIGUSR1 make no checkpoint: "
                "they end this process."
            )
            return
        self._sockets = read, write = socket.socketpair()
        write.setblocking(False)
        self._file = signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, _nothing) for number in SIGNALS}
        arguments = (read, self._file)
        threading.Thread(target=self._hear, args=arguments, daemon=True, name="stopping").start()

    def close(self) -> None:
        """Give the signals back to who had them."""
        if self._sockets is None:
            return
        for number, handler in self._before.items():  # None: set by C, which Python cannot do
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._file)
        read, write = self._sockets
        self._sockets = None
        write.close()  # the end of the thread, which closes `read`

    def _hear(self, read: socket.socket, before: int) -> None:
        with read:
            while numbers := read.recv(64):
                if before != -1:
                    with contextlib.suppress(OSError):
                        os.write(before, numbers)
                for number in numbers:
                    if number in SIGNALS:
                        self._take(signal.Signals(number))

    def _take(self, number: signal.Signals) -> None:
        if self._requested is not None:
            if time.monotonic() - self._since < SAME_SECONDS:
                return
            _logger.error("%s: a further signal: this process ends at once", number.name)
            os._exit(128 + number)
        self._requested, self._since = number.name, time.monotonic()
        _logger.warning(
            "%s: all workers make a checkpoint at the end of a step and end by exit code %d; a "
            "further signal ends this process at once",
            number.name,
            EXIT_CODE,
        )


def _nothing(number: int, frame: FrameType | None) -> None:
    """Be there, so that Python writes the signal into the file."""
