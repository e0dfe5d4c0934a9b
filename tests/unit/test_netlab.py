"""The lab of network namespaces: addresses, rate, counters and cleanup."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import netlab
from tf_redsync import launch

ROOT = Path(__file__).resolve().parents[2]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")

# Worker 1 receives `size` bytes from worker 0, which prints seconds and counted bytes.
TRANSFER = """
import json, os, socket, sys, time
from benchmarks import netlab
size = int(sys.argv[1])
config = json.loads(os.environ["TF_CONFIG"])
host, port = config["cluster"]["worker"][1].split(":")
if config["task"]["index"] == 1:
    with socket.create_server((host, int(port))) as server:
        connection, _ = server.accept()
        left = size
        while left:
            left -= len(connection.recv(1 << 16))
        connection.sendall(b"x")
else:
    while True:
        try:
            connection = socket.create_connection((host, int(port)), timeout=20)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    before = netlab.wire_bytes("eth0")
    start = time.monotonic()
    connection.sendall(bytes(size))
    connection.recv(1)
    print(time.monotonic() - start, netlab.wire_bytes("eth0") - before)
"""


def transfer(lab, size):
    result = launch.run(
        [sys.executable, "-c", TRANSFER, str(size)],
        2,
        env={"PYTHONPATH": str(ROOT)},
        timeout=90,
        grace=1,
        addresses=lab.addresses,
        wrappers=lab.wrappers,
    )
    assert result.exit_code == 0, result.message
    seconds, counted = result.workers[0].output.splitlines()[-1].split()
    return float(seconds), int(counted)


def wait_until_gone(pid):
    end = time.monotonic() + 10
    while netlab.namespaces_of(pid):
        assert time.monotonic() < end, netlab.namespaces_of(pid)
        time.sleep(0.05)


@pytest.mark.timing
@needs_root
def test_rate_and_counters():
    size = 8_000_000
    with netlab.network(2, "100mbit") as lab:
        assert len(netlab.namespaces_of(os.getpid())) == 3
        seconds, counted = transfer(lab, size)
    expected = 8 * size / 100e6
    assert 0.85 * expected < seconds < 2 * expected
    assert size < counted < 1.1 * size
    assert netlab.namespaces_of(os.getpid()) == []


@pytest.mark.timing
@needs_root
def test_faster_link_is_faster():
    with netlab.network(2, "10gbit") as lab:
        seconds, counted = transfer(lab, 8_000_000)
    assert seconds < 0.3
    assert counted > 8_000_000


@needs_root
def test_cleanup_after_an_exception():
    with pytest.raises(KeyError), netlab.network(3, "1gbit"):
        raise KeyError
    assert netlab.namespaces_of(os.getpid()) == []


@needs_root
def test_cleanup_after_a_failed_command(monkeypatch):
    monkeypatch.setattr(netlab, "_BURST", "nonsense")
    with pytest.raises(netlab.NetworkError, match="tc .*burst nonsense.* failed"):
        with netlab.network(2, "1gbit"):
            pass
    assert netlab.namespaces_of(os.getpid()) == []


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)


@pytest.mark.deep  # `test_cleanup_after_an_exception` runs in every commit
@needs_root
@pytest.mark.parametrize("number", SIGNALS)
def test_cleanup_after_a_signal(number):
    # A shell's background job ignores SIGINT, and so would its children.
    code = "import signal, time\nfrom benchmarks import netlab\n"
    code += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "with netlab.network(2, '1gbit'):\n    print('built', flush=True)\n    time.sleep(60)"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as owner:
        assert owner.stdout.readline() == "built\n"
        assert len(netlab.namespaces_of(owner.pid)) == 3
        owner.send_signal(number)
        owner.wait(timeout=60)
    wait_until_gone(owner.pid)


@needs_root
def test_leftovers_of_the_same_name_are_rejected():
    name = f"redsync-{os.getpid()}-worker1"
    subprocess.run(["ip", "netns", "add", name], check=True, timeout=10)
    try:
        with pytest.raises(netlab.NetworkError, match=f"ip netns del {name}"):
            with netlab.network(2, "1gbit"):
                pass
        assert netlab.namespaces_of(os.getpid()) == [name]
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True, timeout=10)


def test_loopback_interface_is_used_without_a_rate():
    with netlab.network(2, "none") as lab:
        assert netlab.namespaces_of(os.getpid()) == []
        assert lab.interface is None and lab.wrappers == ((), ())
        assert all(address.startswith("127.0.0.1:") for address in lab.addresses)


@pytest.mark.parametrize(("uid", "tool", "words"), [(1000, "ip", "root"), (0, None, "iproute2")])
def test_missing_requirement_is_named_and_loopback_is_offered(monkeypatch, uid, tool, words):
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setattr(netlab.shutil, "which", lambda name: tool)
    with pytest.raises(netlab.NetworkError, match=f"{words}.*--rate none"):
        with netlab.network(2, "1gbit"):
            pass


@pytest.mark.parametrize("rate", ["", "fast", "1", "0mbit", "-1gbit", "1gbit; ls", "1 gbit"])
def test_bad_rates(rate):
    with pytest.raises(ValueError, match="`rate` must be none, or like 100mbit"):
        with netlab.network(2, rate):
            pass


@pytest.mark.parametrize("workers", [0, 251])
def test_bad_worker_counts(workers):
    with pytest.raises(ValueError, match="`workers` must be 1 to 250"):
        with netlab.network(workers, "none"):
            pass
