"""Delays packets between machines in network namespaces.

    python benchmarks/relay.py --delay 0.025 --rate 6250000 NAMESPACE NAMESPACE

creates a tap device `eth0` in each namespace, prints `ready`, and forwards frames until its input
is closed: `delay` seconds after they arrive, at most `rate` bytes per second to each machine.
Frames that would wait longer than `QUEUE` are dropped, as by a router. Linux's own delay module,
netem, is missing in many kernels. Needs root and /dev/net/tun.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import heapq
import itertools
import os
import selectors
import struct
import sys
import threading
import time

QUEUE = 0.2  # seconds
INTERFACE = "eth0"
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_CLONE_NEWNET = 0x40000000
_FRAME = 1 << 16


def enter_namespace(name: str) -> None:
    """Moves this thread into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        if libc.setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {name}")
    finally:
        os.close(descriptor)


def tap(namespace: str) -> int:
    """Creates eth0 in a namespace; returns the file of its frames."""
    found: list[int] = []

    def make() -> None:  # a thread may be in another namespace than its process
        enter_namespace(namespace)
        made = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        request = struct.pack("16sH22x", INTERFACE.encode(), _IFF_TAP | _IFF_NO_PI)
        fcntl.ioctl(made, _TUNSETIFF, ctypes.create_string_buffer(request, len(request)))
        found.append(made)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if not found:
        raise OSError(f"no tap device could be made in {namespace}")
    return found[0]


class Relay:
    """Frames in flight.

    Args:
        taps: The machines' files.
        delay: Seconds.
        rate: Bytes per second to each machine.

    Attributes:
        dropped: Number of dropped frames.
    """

    def __init__(self, taps: list[int], delay: float, rate: float):
        self.taps, self.delay, self.rate = taps, delay, rate
        self.dropped = 0
        self._free = dict.fromkeys(taps, 0.0)  # time at which the link to a machine is free
        self._behind: dict[bytes, int] = {}  # machines by their address
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._numbers = itertools.count()

    def take(self, source: int, frame: bytes, now: float) -> None:
        """Queues a frame that a machine has sent."""
        self._behind[frame[6:12]] = source
        known = self._behind.get(frame[:6])
        for target in self.taps if known is None else [known]:
            if target == source:
                continue
            arrives = now + self.delay
            starts = max(arrives, self._free[target])
            if starts - arrives > QUEUE:
                self.dropped += 1
                continue
            self._free[target] = due = starts + len(frame) / self.rate
            heapq.heappush(self._under_way, (due, next(self._numbers), target, frame))

    def give(self, now: float) -> list[tuple[int, bytes]]:
        """Returns the frames that are due, and their destinations."""
        found = []
        while self._under_way and self._under_way[0][0] <= now:
            _, _, target, frame = heapq.heappop(self._under_way)
            found.append((target, frame))
        return found

    def wait(self, now: float) -> float | None:
        """Returns the seconds until the next frame is due; `None` if there is none."""
        return max(0.0, self._under_way[0][0] - now) if self._under_way else None


def carry(relay: Relay, until: int) -> None:
    """Forwards frames until the file `until` is readable or closed at its other end."""
    with selectors.DefaultSelector() as selector:
        for file in (*relay.taps, until):
            selector.register(file, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select(relay.wait(time.monotonic())):
                if key.fd == until:
                    return
                with contextlib.suppress(BlockingIOError):  # no more frames
                    while True:
                        relay.take(key.fd, os.read(key.fd, _FRAME), time.monotonic())
            for target, frame in relay.give(time.monotonic()):
                try:
                    os.write(target, frame)
                except OSError:  # its machine's queue is full, or it has ended
                    relay.dropped += 1


def main() -> None:
    """Creates the devices and forwards frames until the input is closed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--delay", type=float, required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("namespaces", nargs="+")
    args = parser.parse_args()
    relay = Relay([tap(name) for name in args.namespaces], args.delay, args.rate)
    print("ready", flush=True)
    carry(relay, sys.stdin.fileno())


if __name__ == "__main__":
    main()
