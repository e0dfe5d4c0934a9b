"""Machines in network namespaces, joined by a simulated cable.

    with Network(2) as network:
        Job(Settings(namespaces=network.namespaces), addresses=network.addresses)
        network.delay = 0.1      # seconds, in each direction
        network.cut = True       # drops all frames
        network.loss = 0.01      # probability for each packet
        network.spoil = 3        # corrupts the next three large packets

Each machine has one tap device. A thread of this process forwards its frames to all others after
their delay, as a hub does. Linux's own delay module, netem, is missing in many kernels. The network
needs root and /dev/net/tun.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import random
import selectors
import subprocess
import threading
import time

from benchmarks import relay

PORT = 20000
_SUBNET = "10.213.8"
_ETHERNET, _IP_TCP, _LARGE = 14, 6, 600  # bytes; a number; bytes of payload
_GUARD = 'cat; sleep 0.2; for name in "$@"; do ip netns del "$name" 2>/dev/null; done'


def missing() -> str:
    """Why this machine cannot create a network, or ""."""
    if os.geteuid() != 0:
        return "it needs root, for network namespaces"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "it needs /dev/net/tun"
    if subprocess.run(["ip", "-V"], capture_output=True, check=False).returncode:
        return "it needs `ip` (Debian package iproute2)"
    return ""


class Network:
    """Simulated network, see the module's docstring.

    Args:
        workers: Number of machines.
        chance: Random numbers for packet loss.

    Attributes:
        delay: Delay of each frame in seconds.
        cut: Whether all frames are dropped.
        loss: Probability of dropping each frame.
        lost: Number of frames dropped by `loss`.
        spoil: Number of next large packets to corrupt without changing TCP's checksum.
    """

    def __init__(self, workers: int, chance: random.Random | None = None):
        self.delay, self.cut, self.loss, self.lost, self.spoil = 0.0, False, 0.0, 0, 0
        self._chance = chance or random.Random(0)
        self.namespaces = tuple(f"redsync-chaos-{os.getpid()}-{i}" for i in range(workers))
        self.addresses = tuple(f"{_SUBNET}.{i + 1}:{PORT}" for i in range(workers))
        self._taps: list[int] = []
        self._over = threading.Event()

    def __enter__(self) -> Network:
        # It removes the namespaces when this process closes the pipe, however it ends.
        self._guard = subprocess.Popen(
            ["sh", "-c", _GUARD, "sh", *self.namespaces],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        for i, name in enumerate(self.namespaces):
            _ip("netns", "add", name)
            self._taps.append(relay.tap(name))
            _ip("-n", name, "address", "add", f"{_SUBNET}.{i + 1}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                _ip("-n", name, "link", "set", interface, "up")
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._over.set()
        self._thread.join()
        for tap in self._taps:
            os.close(tap)
        self._guard.stdin.close()
        self._guard.wait()

    def _carry(self) -> None:
        """Forwards frames until the end."""
        numbers, under_way = itertools.count(), []
        with selectors.DefaultSelector() as selector:
            for tap in self._taps:
                selector.register(tap, selectors.EVENT_READ)
            while not self._over.is_set():
                next_due = under_way[0][0] - time.monotonic() if under_way else 0.05
                for key, _ in selector.select(min(0.05, max(0.0, next_due))):
                    frame = os.read(key.fd, 1 << 16)
                    if self.loss and self._chance.random() < self.loss:
                        self.lost += 1
                    elif not self.cut:
                        due = time.monotonic() + self.delay
                        entry = (due, next(numbers), key.fd, self._perhaps_spoiled(frame))
                        heapq.heappush(under_way, entry)
                while under_way and under_way[0][0] <= time.monotonic():
                    _, _, source, frame = heapq.heappop(under_way)
                    for tap in self._taps:
                        if tap != source and not self.cut:
                            with contextlib.suppress(OSError):  # that interface is down
                                os.write(tap, frame)

    def _perhaps_spoiled(self, frame: bytes) -> bytes:
        if not self.spoil or len(frame) < _LARGE or frame[_ETHERNET + 9] != _IP_TCP:
            return frame
        self.spoil -= 1
        return spoiled(frame)


def spoiled(frame: bytes) -> bytes:
    """Flips two bits of a frame's TCP payload without changing the checksum.

    The checksum is a sum of words of 16 bits. Changing one bit from 0 to 1, and the same bit of
    another word from 1 to 0, keeps the sum. A frame without such a pair is returned unchanged.
    """
    start = _ETHERNET + 4 * (frame[_ETHERNET] & 15)
    start += 4 * (frame[start + 12] >> 4)
    changed = bytearray(frame)
    middle = start + (len(frame) - start) // 2 // 2 * 2
    for at in range(middle, len(frame) - 4, 2):
        for bit in range(8):
            first, second = changed[at] >> bit & 1, changed[at + 2] >> bit & 1
            if first != second:
                changed[at] ^= 1 << bit
                changed[at + 2] ^= 1 << bit
                return bytes(changed)
    return frame


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)
