"""SIGTERM and SIGUSR1: a scheduler asks this process to stop, with some time left to save.

Knows signals and the exit code, but neither training nor checkpoints. A callback listens while
`fit` runs, looks at `requested` after each step, has the workers agree, saves, raises `Stopped`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

# EX_TEMPFAIL of sysexits.h: "a temporary failure; the user is invited to retry". No failure of
# Python (1, 2), of a shell (126, 127), of timeout(1) (124), of a signal (128 and more).
EXIT_CODE = 75
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# A scheduler may signal every process of a job, and the launcher passes on what it gets.
SAME_SECONDS = 5.0
_logger = logging.getLogger("tf_redsync")


_listening: list[Requests] = []  # in the main thread, the last one to begin at the end


@contextlib.contextmanager
def given_back_by_errors() -> Iterator[None]:
    """If this context is left by an error, who began to listen in it gives the signals back."""
    before = len(_listening)
    try:
        yield
    except BaseException:
        if threading.current_thread() is threading.main_thread():
            for requests in reversed(_listening[before:]):
                requests.close()
        raise


class Stopped(SystemExit):
    """The training has stopped on request, with a checkpoint: the program ends by `EXIT_CODE`.

    No `Exception`: what catches the errors of a training lets it pass.
    """

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


class Requests:
    """What SIGTERM and SIGUSR1 ask for, between `listen` and `close`.

    The first one is a request, while the main thread is in the `fit` that has called `listen`.
    Another one, `SAME_SECONDS` later or more, ends the process at once, by 128 + its number, also
    while the main thread waits in TensorFlow, where no handler of Python runs: signals come through
    a file to a thread of its own. After a `fit` that has ended by an error, signals do what they
    did before it: at once within `given_back_by_errors`, else from the next signal on.
    """

    def __init__(self) -> None:
        self._requested: str | None = None
        self._since = 0.0
        self._fit: CodeType | None = None
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
        self._fit = next((c for c in _running(sys._getframe()) if c.co_name == "fit"), None)
        self._sockets = read, write = socket.socketpair()
        write.setblocking(False)
        self._file = signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        _listening.append(self)
        arguments = (read, self._file)
        threading.Thread(target=self._hear, args=arguments, daemon=True, name="stopping").start()

    def close(self) -> None:
        """Give the signals back to who had them."""
        if self._sockets is None:
            return
        for number, handler in self._before.items():  # None: set by C, which Python cannot do
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._file)
        _listening.remove(self)
        _, write = self._sockets
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

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, when it comes to it. That there is a handler wakes the other one."""
        if not self._in_fit(frame):
            self.close()
            os.kill(os.getpid(), number)

    def _in_fit(self, frame: FrameType | None) -> bool:
        return self._fit is None or self._fit in _running(frame)

    def _take(self, number: signal.Signals) -> None:
        main = threading.main_thread().ident
        if main is not None and not self._in_fit(sys._current_frames().get(main)):
            return
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


def _running(frame: FrameType | None) -> Iterator[CodeType]:
    """The functions that run, from the innermost one."""
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back
