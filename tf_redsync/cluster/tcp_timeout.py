"""Raises the TCP timeout of TensorFlow's server, so that a job survives a broken link.

gRPC servers set TCP_USER_TIMEOUT to 20 s on every connection that they accept. The kernel resets a
connection whose data stay unacknowledged for longer. TensorFlow has no channel argument and gRPC no
environment variable for this timeout. So a thread sets the option on the sockets of this process.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time

GRPC_MILLISECONDS = 20_000
_EVERY_SECONDS = 2.0  # connections open at the first collective and after an error
_TCP_USER_TIMEOUT = 18  # Linux's number; Python lacks the name on some systems
_MAX_MILLISECONDS = 2**31 - 1


def keep(port: int, seconds: float) -> None:
    """Raise the timeout of all connections accepted on `port`, until the process ends.

    Args:
        port: The port of TensorFlow's server.
        seconds: Maximum time that data may stay unacknowledged.
    """
    milliseconds = min(int(1000 * seconds), _MAX_MILLISECONDS)
    name = "tf_redsync_connections"
    threading.Thread(target=_keep, args=(port, milliseconds), name=name, daemon=True).start()


def _keep(port: int, milliseconds: int) -> None:
    while True:
        extend(port, milliseconds)
        time.sleep(_EVERY_SECONDS)


def extend(port: int, milliseconds: int) -> int:
    """Replace gRPC's timeout on the connections accepted on `port`; return their number."""
    libc = ctypes.CDLL(None)  # creates a class in each call
    files = os.listdir("/proc/self/fd")
    return sum(_extended(libc, int(file), port, milliseconds) for file in files)


def _extended(libc: ctypes.CDLL, file: int, port: int, milliseconds: int) -> bool:
    # Through libc: a `socket` object could change the blocking mode, and would close the file.
    value, size = ctypes.c_int(), ctypes.c_uint(ctypes.sizeof(ctypes.c_int))
    option = file, socket.IPPROTO_TCP, _TCP_USER_TIMEOUT
    failed = libc.getsockopt(*option, ctypes.byref(value), ctypes.byref(size))
    if failed or value.value != GRPC_MILLISECONDS or _port(libc, file) != port:
        return False
    return not libc.setsockopt(*option, ctypes.byref(ctypes.c_int(milliseconds)), size)


def _port(libc: ctypes.CDLL, file: int) -> int:
    """Return the local port of a TCP socket: the same two bytes for IPv4 and IPv6."""
    address = ctypes.create_string_buffer(128)
    size = ctypes.c_uint(len(address))
    libc.getsockname(file, address, ctypes.byref(size))
    return int.from_bytes(address.raw[2:4], "big")
