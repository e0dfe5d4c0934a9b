"""Speaks for a process while TensorFlow starts in it, and ends it if it waits in vain.

When the workers have met, TensorFlow's servers wait for each other once more: for an hour, without
a word, deaf to SIGTERM and Ctrl-C, and without letting any thread of Python run. A worker whose
process ends just then, for want of a GPU, say, would keep the others for that hour.

So the connections of the meeting stay open meanwhile, from the chief to each of the others, and a
process of its own looks at them: one that ends before its worker has said that TensorFlow has
started is that of a process that has ended. This file is that process's program; it imports nothing
but Python's own modules.
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

GRACE_SECONDS = 10.0  # for a process whose other worker is gone: it may end by an error of its own
_FIRST_SECONDS, _EVERY_SECONDS = 10, 30  # of waiting, after which it says for whom
_STARTED = b'"started"'
_LOST = re.compile(rb'{"lost": "(.*?)"}')
_logger = logging.getLogger("tf_redsync")


@contextlib.contextmanager
def watching(lines: Mapping[str, socket.socket], seconds: float) -> Iterator[None]:
    """Within this context, TensorFlow starts; without a line to any worker, nothing happens.

    Args:
        lines: By the other workers' names, connections that are closed at the end.
        seconds: After which a process that still waits is ended.
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
            process.stdin.close()  # its end
            process.wait()


def _start(lines: Mapping[str, socket.socket], seconds: float) -> subprocess.Popen[bytes] | None:
    files = [line.fileno() for line in lines.values()]
    task = [os.getpid(), seconds, dict(zip(files, lines, strict=True))]
    command = [sys.executable, "-I", "-S", __file__, json.dumps(task)]
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=files)
    except OSError as error:
        _logger.debug("no witness of TensorFlow's start: %s", error)
        return None


def main(text: str) -> None:
    """Look until the parent's end of the pipe is closed, or until it has to be ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    parent, seconds, names = json.loads(text)
    began = time.monotonic()
    heard = {int(number): b"" for number in names}  # by those that are not known to have started
    end, says = began + seconds, began + _FIRST_SECONDS
    with selectors.DefaultSelector() as selector:
        for number in (0, *heard):
            selector.register(number, selectors.EVENT_READ)
        while (now := time.monotonic()) < end:
            for key, _ in selector.select(max(0.0, (min(end, says) if heard else end) - now)):
                if key.fd == 0:
                    return
                data = _read(key.fd)
                heard[key.fd] += data
                lost = _LOST.search(heard[key.fd])
                if data and _STARTED not in heard[key.fd] and not lost:
                    continue
                selector.unregister(key.fd)
                if _STARTED in heard.pop(key.fd):
                    continue
                end = min(end, time.monotonic() + GRACE_SECONDS)
                name = lost[1].decode() if lost else names[str(key.fd)]
                for other in heard:
                    _tell(other, name)
                _say(
                    f"{name} has ended while TensorFlow started, and the others cannot start "
                    f"without it: this process ends within {GRACE_SECONDS:g} s"
                )
            if time.monotonic() >= says and heard:
                says += _EVERY_SECONDS
                waits, waited = ", ".join(names[str(n)] for n in heard), time.monotonic() - began
                _say(f"waiting for TensorFlow to start on {waits} ({waited:.0f} s)")
    _say("TensorFlow waits in vain: this process is ended by SIGKILL, for it hears nothing else")
    os.kill(parent, signal.SIGKILL)


def _read(number: int) -> bytes:
    """What has come on a connection; nothing at its end, however it ends."""
    try:
        return os.read(number, 1 << 16)
    except OSError:
        return b""


def _tell(number: int, name: str) -> None:
    """Pass on who is lost."""
    with contextlib.suppress(OSError):
        os.write(number, f'{{"lost": "{name}"}}\n'.encode())


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
