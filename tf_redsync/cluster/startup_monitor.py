"""Monitors TensorFlow start-up and reports failures to the other workers.

After the rendezvous, TensorFlow's servers wait for each other once more, for up to an hour. They
wait silently, ignore SIGTERM and Ctrl-C, and hold Python's global interpreter lock. If a worker
failed at that point, for example without a GPU, the others would hang for that hour.

So the connections of the rendezvous, from the chief to every other worker, stay open, and a
separate process monitors them. If a connection closes before its worker has reported that
TensorFlow is started, the worker has ended. This file is the program of the monitor; it imports
only Python's standard library.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping

GRACE_SECONDS = 10.0  # from the loss of another worker to SIGKILL; TensorFlow may raise before
_FIRST_SECONDS, _EVERY_SECONDS = 10, 30  # time to the first report, and between later ones
_STARTED = b'"started"'
_LOST = re.compile(rb'{"lost": "(.*?)"}')
_logger = logging.getLogger("tf_redsync")


@contextlib.contextmanager
def watching(lines: Mapping[str, socket.socket], seconds: float) -> Iterator[None]:
    """Context in which TensorFlow starts under the monitor; a no-op without connections.

    Args:
        lines: Connections by the names of the other workers; closed at the end.
        seconds: Time limit, after which the monitor kills this process if it still waits.
    """
    process = _start(lines, seconds) if lines else None
    try:
        yield
        for line in lines.values():
            with contextlib.suppress(OSError):
                line.sendall(b"{" + _STARTED + b": true}\n")
                line.shutdown(socket.SHUT_WR)
    finally:
        for line in lines.values():
            line.close()
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()  # ends the monitor
            process.wait()


def _start(lines: Mapping[str, socket.socket], seconds: float) -> subprocess.Popen[bytes] | None:
    files = [line.fileno() for line in lines.values()]
    task = [os.getpid(), seconds, dict(zip(files, lines, strict=True))]
    command = [sys.executable, "-I", "-S", __file__, json.dumps(task)]
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=files)
    except OSError as error:
        _logger.debug("TensorFlow starts without a monitor: %s", error)
        return None


def main(text: str) -> None:
    """Monitor until the parent closes the pipe, or until the parent must be killed.

    Args:
        text: JSON list of the parent's process ID, the time limit in seconds, and the names of the
            other workers by file descriptor.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    parent, seconds, names = json.loads(text)
    began = time.monotonic()
    received = {int(number): b"" for number in names}  # of workers whose TensorFlow has not started
    end, says = began + seconds, began + _FIRST_SECONDS
    with selectors.DefaultSelector() as selector:
        for number in (0, *received):
            selector.register(number, selectors.EVENT_READ)
        while (now := time.monotonic()) < end:
            wait = (
                min(says if received else now + _EVERY_SECONDS, end) - now
            )  # `end` may be infinite
            for key, _ in selector.select(max(0.0, wait)):
                if key.fd == 0:
                    return
                data = _read(key.fd)
                received[key.fd] += data
                lost = _LOST.search(received[key.fd])
                if data and _STARTED not in received[key.fd] and not lost:
                    continue
                selector.unregister(key.fd)
                if _STARTED in received.pop(key.fd):
                    continue
                end = min(end, time.monotonic() + GRACE_SECONDS)
                name = lost[1].decode() if lost else names[str(key.fd)]
                for other in received:
                    _forward_loss(other, name)
                _say(
                    f"{name} has ended while TensorFlow started, and the others cannot start "
                    f"without it: this process ends within {GRACE_SECONDS:g} s"
                )
            if time.monotonic() >= says and received:
                says += _EVERY_SECONDS
                waits, waited = ", ".join(names[str(n)] for n in received), time.monotonic() - began
                _say(f"waiting for TensorFlow to start on {waits} ({waited:.0f} s)")
    _say("TensorFlow does not start: this process ends by SIGKILL, since it ignores other signals")
    os.kill(parent, signal.SIGKILL)


def _read(number: int) -> bytes:
    """Return the bytes received on a connection; empty if it is closed or broken."""
    try:
        return os.read(number, 1 << 16)
    except OSError:
        return b""


def _forward_loss(number: int, name: str) -> None:
    """Forward the name of a lost worker."""
    with contextlib.suppress(OSError):
        os.write(number, f'{{"lost": "{name}"}}\n'.encode())


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
