"""Reservation of TCP ports among the processes of this machine.

A worker's port is free for an instant: after the rendezvous, before TensorFlow's server listens. An
abstract Unix socket, which Linux removes with its process, marks it as taken meanwhile.
"""

from __future__ import annotations

import socket
import sys


def reserve(port: int) -> socket.socket | None:
    """Reserve a port until the returned socket is closed.

    Args:
        port: A TCP port. Its reservation holds within one network namespace, as the port does.

    Returns:
        A socket, or `None` on systems other than Linux, which have no abstract sockets.

    Raises:
        OSError: if another process of this machine has reserved `port`.
    """
    if not sys.platform.startswith("linux"):
        return None
    place = socket.socket(socket.AF_UNIX)
    try:
        place.bind(f"\0tf_redsync/port/{port}")
    except OSError:
        place.close()
        raise
    return place
