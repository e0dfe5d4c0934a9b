"""Reservation of TCP ports among the processes of this machine.

A worker's port is free for an instant: after the rendezvous, before TensorFlow's server listens. An
abstract Unix socket, which Linux removes with its process, marks it as taken meanwhile.
"""

from __future__ import annotations

import socket


def reserve(port: int) -> socket.socket:
    """Reserve a port until the returned socket is closed.

    Args:
        port: A TCP port. Its reservation holds within one network namespace, as the port does.

    Returns:
        A socket.

    Raises:
        OSError: if another process of this machine has reserved `port`.
    """
    place = socket.socket(socket.AF_UNIX)
    try:
        place.bind(f"\0tf_redsync/port/{port}")
    except OSError:
        place.close()
        raise
    return place
