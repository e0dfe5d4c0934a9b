"""The relay that delays packets: order, rate, drops and real round trips."""

import os
import subprocess
import sys

import pytest

from benchmarks import netlab, relay
from tests.unit.test_netlab import transfer

MACHINES = (b"aaaaaa", b"bbbbbb", b"cccccc")


def frame(target, source, size=100):
    return MACHINES[target] + MACHINES[source] + bytes(size - 12)


def make_relay(delay=0.025, rate=1e6):
    return relay.Relay([10, 11, 12], delay, rate)


def test_frame_is_broadcast_until_its_machine_is_known():
    network = make_relay(rate=1e9)
    network.take(10, frame(1, 0), 0.0)
    assert network.give(0.024) == []
    assert [target for target, _ in network.give(0.026)] == [11, 12]
    network.take(11, frame(0, 1), 1.0)
    assert network.give(1.026) == [(10, frame(0, 1))]


def test_machine_receives_at_the_rate():
    network = make_relay()
    network.take(11, frame(0, 1), 0.0)
    network.give(1.0)
    for _ in range(5):  # at once, 10 ms each
        network.take(10, frame(1, 0, 10_000), 1.0)
    times = []
    while (wait := network.wait(0.0)) is not None:
        times.append(round(wait, 6))
        assert len(network.give(wait)) == 1
    assert times == [1.035, 1.045, 1.055, 1.065, 1.075]


def test_frames_beyond_the_queue_are_dropped():
    network = make_relay()
    network.take(11, frame(0, 1), 0.0)
    network.give(1.0)
    for _ in range(30):
        network.take(10, frame(1, 0, 11_000), 1.0)
    assert network.dropped == 30 - 19  # 0.2 s hold 18 frames of 11 ms each, and one is in transit


@pytest.mark.timing
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
@pytest.mark.skipif(not os.access("/dev/net/tun", os.W_OK), reason="needs /dev/net/tun")
def test_round_trip_and_rate():
    """One second at 20 Mbit/s: TCP needs several round trips to reach the rate."""
    with netlab.network(2, "20mbit", latency=50) as lab:
        pinged = subprocess.run(
            [*lab.wrappers[0], sys.executable, "-c", PING, lab.addresses[1].split(":")[0]],
            capture_output=True, text=True, timeout=30, check=True,
        )  # fmt: skip
        seconds, counted = transfer(lab, 2_500_000)
    assert 0.05 <= float(pinged.stdout) < 0.09
    assert 1.0 < seconds < 2.0
    assert 2_500_000 < counted < 2_800_000
    assert netlab.namespaces_of(os.getpid()) == []


# The fastest of some refused connections takes one round trip.
PING = """
import socket, sys, time
times = []
for _ in range(5):
    start = time.monotonic()
    try:
        socket.create_connection((sys.argv[1], 9), timeout=5)
    except ConnectionRefusedError:
        times.append(time.monotonic() - start)
print(min(times))
"""


@pytest.mark.parametrize(("rate", "latency"), [("none", 5), ("10mbit", -1)])
def test_latency_out_of_range(rate, latency):
    with pytest.raises(ValueError, match=f"latency={latency}"), netlab.network(2, rate, latency):
        pass
