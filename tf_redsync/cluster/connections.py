"""Keeps TCP connections of TensorFlow's server open as long as the job waits for a broken link.

gRPC's servers set TCP_USER_TIMEOUT to 20 s on every connection that they accept: the kernel resets
a connection whose data stay unacknowledged for longer. TensorFlow passes no channel argument that
changes it, and gRPC has no environment variable for it. So a thread sets the option on the sockets
of this process. On other systems than Linux nothing happens.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import threading
import time

GRPC_MILLISECONDS = 20_000
_EVERY_SECONDS = 2.0  # connections are made at the first collective, and again after an error
_TCP_USER_TIMEOUT = 18  # of Linux; Python 3.11 has no name for it on all systems
_MAX_MILLISECONDS = 2**31 - 1


def keep(port: int, seconds: float) -> None:
    """Let connections that this process accepts on `port` wait until the process ends.

    Args:
        port: Of TensorFlow's server.
        seconds: How long data may stay unacknowledged.
    """
    if sys.platform.startswith("linux"):
        milliseconds = min(int(1000 * seconds), _MAX_MILLISECONDS)
        name = "tf_redsync_connections"
        threading.Thread(target=_keep, args=(port, milliseconds), name=name, daemon=True).start()


def _keep(port: int, milliseconds: int) -> None:
    while True:
        extend(port, milliseconds)
        time.sleep(_EVERY_SECONDS)


def extend(port: int, milliseconds: int) -> int:
    """Replace gRPC's timeout on connections that were accepted on `port`; return on how many."""
    return sum(_extended(int(file), port, milliseconds) for file in os.listdir("/proc/self/fd"))


def _extended(file: int, port: int, milliseconds: int) -> bool:
    # By libc: a `socket` object of a file may change whether it blocks, and would close it.
    libc = ctypes.CDLL(None)
    value, size = ctypes.c_int(), ctypes.c_uint(ctypes.sizeof(ctypes.c_int))
    option = file, socket.IPPROTO_TCP, _TCP_USER_TIMEOUT
    failed = libc.getsockopt(*option, ctypes.byref(value), ctypes.byref(size))
    if failed or value.value != GRPC_MILLISECONDS or _port(libc, file) != port:
        return False
    return not libc.setsockopt(*option, ctypes.byref(ctypes.c_int(milliseconds)), size)


def _port(libc: ctypes.CDLL, file: int) -> int:
    """Return the local port of a TCP socket: the same two bytes of IPv4's and IPv6's addresses."""
    address = ctypes.create_string_buffer(128)
    size = ctypes.c_uint(len(address))
    libc.getsockname(file, address, ctypes.byref(size))
    return int.from_bytes(address.raw[2:4], "big")
