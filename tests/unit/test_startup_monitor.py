"""The start-up monitor of a process, in real processes without TensorFlow."""

import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from tf_redsync.cluster import startup_monitor

# Imported by path: the package would import TensorFlow. It waits like TensorFlow, without signals.
BODY = f"""
import importlib.util, signal, socket, sys, time
spec = importlib.util.spec_from_file_location("monitor", {startup_monitor.__file__!r})
monitor = importlib.util.module_from_spec(spec)
spec.loader.exec_module(monitor)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
line = socket.socket(fileno=int(sys.argv[1]))
with monitor.watching({{"worker 1 at h:1": line}}, float(sys.argv[2])):
    print("starts", flush=True)
    time.sleep(float(sys.argv[3]))
print("started", flush=True)
"""


@pytest.fixture
def starting_process(monkeypatch, tmp_path):
    """A process in which TensorFlow starts, and the other worker's end of its connection."""
    text = open(startup_monitor.__file__).read()
    fast = tmp_path / "monitor.py"
    fast.write_text(text.replace("GRACE_SECONDS = 10.0", "GRACE_SECONDS = 0.5").replace(
        "_FIRST_SECONDS, _EVERY_SECONDS = 10, 30", "_FIRST_SECONDS, _EVERY_SECONDS = 0.6, 30"
    ))  # fmt: skip
    processes = []

    def make(seconds=60.0, takes=60.0):
        local, remote = socket.socketpair()
        body = BODY.replace(startup_monitor.__file__, str(fast))
        words = [sys.executable, "-c", body, str(remote.fileno()), str(seconds), str(takes)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            words, stdout=pipe, stderr=pipe, text=True, pass_fds=[remote.fileno()]
        )
        remote.close()
        processes.append(process)
        assert process.stdout.readline() == "starts\n"
        return process, local

    yield make
    for process in processes:
        process.kill()
        process.communicate()


def test_worker_that_ends_during_start_up_ends_the_other(starting_process):
    process, other = starting_process()
    other.sendall(b'tf_redsync {"unreached": []}\n')  # the rest of the rendezvous
    line = process.stderr.readline().strip()
    assert re.fullmatch(r"waiting for TensorFlow to start on worker 1 at h:1 \(\d+ s\)", line)
    other.close()
    assert process.wait(10) == -signal.SIGKILL
    stderr = process.stderr.read()
    assert stderr.startswith("worker 1 at h:1 has ended while TensorFlow started")
    assert "SIGKILL" in stderr


def test_chief_reports_the_lost_worker_to_the_others(starting_process):
    process, other = starting_process()
    other.sendall(b'tf_redsync {"go": true}\n{"lost": "worker 2 at h:2"}\n')
    assert process.wait(10) == -signal.SIGKILL
    assert process.stderr.read().startswith("worker 2 at h:2 has ended while TensorFlow started")


def test_worker_that_exceeds_the_limit_is_ended(starting_process):
    process, _ = starting_process(seconds=0.8)
    assert process.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize("seconds", [60.0, float("inf")])
def test_worker_may_end_after_its_start_up(starting_process, seconds):
    process, other = starting_process(seconds, takes=1.5)
    other.sendall(b'{"started": true}\n')
    other.close()
    out, stderr = process.communicate(timeout=10)
    assert (process.returncode, out, stderr) == (0, "started\n", "")


def test_completed_start_up_is_reported_and_leaves_no_process(starting_process):
    process, other = starting_process(takes=0.0)
    assert process.wait(10) == 0
    other.settimeout(10)
    assert other.recv(100) == b'{"started": true}\n' and other.recv(100) == b""


def test_process_that_fails_during_start_up_is_detected(starting_process):
    process, other = starting_process()
    began = time.monotonic()
    process.kill()
    other.settimeout(10)
    assert other.recv(100) == b"" and time.monotonic() - began < 5  # its monitor ends with it
