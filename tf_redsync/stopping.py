"""Preemption by a scheduler: handling of SIGTERM and SIGUSR1, and the exit code after them.

This module knows nothing of training and checkpoints. A callback handles the signals during `fit`:
it reads `requested` after each step, agrees with the other workers, saves and raises `Stopped`.
"""

from __future__ import annotations

import contextlib
import ctypes
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

# EX_TEMPFAIL of sysexits.h: "a temporary failure; the user is invited to retry". It differs from
# the codes of Python (1, 2), shells (126, 127), timeout(1) (124) and signals (128 and more).
EXIT_CODE = 75
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# A scheduler may signal every process of a job, and the launcher forwards its signals.
SAME_SECONDS = 5.0
_HANDLING_SECONDS = 1.0  # the receiving thread may wait for a lock of logging
_SIGACTION = ctypes.CDLL(None).sigaction
_logger = logging.getLogger("tf_redsync")


_listening: list[StopSignals] = []  # in the main thread, in the order of `listen`


def _stop_listening_in_child() -> None:
    """Restore the previous handlers in a forked child, whose signals do not concern the parent.

    A pool that loads data ends its children by SIGTERM. A child inherits the handler, which would
    ignore the signal. It also inherits the socket, through which the parent would receive the
    child's signal as its own. TensorFlow's C handler for several workers only wakes a thread, and
    the child does not have that thread.
    """
    if signal.getsignal(signal.SIGTERM) in (None, signal.SIG_DFL):  # as far as Python knows
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if _listening:
        signal.set_wakeup_fd(-1)
    for signals in reversed(_listening):
        signals.restore_handlers()
    _listening.clear()


os.register_at_fork(after_in_child=_stop_listening_in_child)


class Stopped(SystemExit):
    """Training has stopped on request, with a checkpoint; the program exits with `EXIT_CODE`.

    It is not an `Exception`, so that handlers of training errors do not catch it.
    """

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


class StopSignals:
    """Handler of SIGTERM and SIGUSR1 between `listen` and `close`.

    While the main thread is in the `fit` that called `listen`, the first signal is a request to
    stop. SIGTERM at least `SAME_SECONDS` later ends the process immediately, with exit code 143.
    A later SIGUSR1 is ignored, because the launcher of an elastic job repeats it. A separate thread
    receives the signals through a socket, because Python runs no handler while the main thread
    waits in TensorFlow. If an error ends `fit` without `close`, the previous handlers apply again
    from the next signal on.
    """

    def __init__(self) -> None:
        self._requested: str | None = None
        self._since = 0.0
        self._fit: CodeType | None = None
        self._before: dict[int, Any] = {}
        self._action = b""  # C's `struct sigaction` of SIGUSR1
        self._file = -1  # the previous wakeup file descriptor
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self._thread: threading.Thread | None = None

    @property
    def requested(self) -> str | None:
        """The name of the signal that requested the stop, or `None`."""
        return self._requested

    def listen(self) -> None:
        """Install the handlers; warn outside of the main thread, where Python cannot.

        A signal received before the last `close` remains a request.
        """
        if self._sockets is not None:
            return
        if threading.current_thread() is not threading.main_thread():
            _logger.warning(
                "`fit` does not run in the main thread, so SIGTERM and SIGUSR1 end this process "
                "without a checkpoint."
            )
            return
        self._fit = next((c for c in _running(sys._getframe()) if c.co_name == "fit"), None)
        self._sockets = read, write = socket.socketpair()
        write.setblocking(False)
        self._file = signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        action = ctypes.create_string_buffer(1024)  # more than it has
        _SIGACTION(signal.SIGUSR1, None, action)
        self._action = action.raw
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        _listening.append(self)
        arguments = (read, self._file)
        self._thread = threading.Thread(
            target=self._receive, args=arguments, daemon=True, name="stopping"
        )
        self._thread.start()

    def close(self) -> None:
        """Restore the previous handlers, after all signals received so far are handled."""
        if self._sockets is None or self._thread is None:
            return
        self.restore_handlers()
        signal.set_wakeup_fd(self._file)
        _listening.remove(self)
        _, write = self._sockets
        thread, self._sockets, self._thread = self._thread, None, None
        write.shutdown(socket.SHUT_WR)  # ends the thread, also if a child process has a copy
        write.close()
        thread.join(_HANDLING_SECONDS)

    def restore_handlers(self) -> None:
        """Install the handlers that were in place before `listen`.

        Python does not know handlers of C. That of `faulthandler.register` for SIGUSR1 is restored.
        That of TensorFlow for SIGTERM is not: the process would ignore the signal.
        """
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        _SIGACTION(signal.SIGUSR1, self._action, None)

    def _receive(self, read: socket.socket, before: int) -> None:
        with read:
            while numbers := read.recv(64):
                if before != -1:
                    with contextlib.suppress(OSError):
                        os.write(before, numbers)
                for number in numbers:
                    if number in SIGNALS:
                        self._handle_stop(signal.Signals(number))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Restore the previous handlers if `fit` has ended; Python runs this in the main thread.

        Python writes to the wakeup file descriptor only for signals that have a handler.
        """
        if not self._in_fit(frame):
            self.close()
            os.kill(os.getpid(), number)

    def _in_fit(self, frame: FrameType | None) -> bool:
        return self._fit is None or self._fit in _running(frame)

    def _handle_stop(self, number: signal.Signals) -> None:
        main = threading.main_thread().ident
        if main is not None and not self._in_fit(sys._current_frames().get(main)):
            return
        if self._requested is not None:
            if number == signal.SIGUSR1 or time.monotonic() - self._since < SAME_SECONDS:
                return
            _logger.error("%s: second signal: this process exits immediately", number.name)
            os._exit(128 + number)
        self._requested, self._since = number.name, time.monotonic()
        _logger.warning(
            "%s: all workers save a checkpoint after a step and exit with code %d; a later "
            "SIGTERM ends this process immediately",
            number.name,
            EXIT_CODE,
        )


def _running(frame: FrameType | None) -> Iterator[CodeType]:
    """Yield the code of the running functions, from the innermost one outwards."""
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back
