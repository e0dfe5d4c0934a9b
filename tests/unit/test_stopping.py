"""Signals that request a stop, in real processes without TensorFlow."""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import pytest

from tf_redsync import stopping

# Imported by path: the package would import TensorFlow.
HEAD = f"""
import ctypes, importlib.util, os, signal, sys, time
spec = importlib.util.spec_from_file_location("stopping", {stopping.__file__!r})
stopping = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stopping)
stopping.SAME_SECONDS = 0.3
requests = stopping.StopSignals()
requests.listen()
"""


@pytest.fixture
def requests():
    signals = stopping.StopSignals()
    signals.listen()
    yield signals
    signals.close()


def wait_for(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "condition not reached"
        time.sleep(0.01)


@contextlib.contextmanager
def script(body):
    command = [sys.executable, "-c", HEAD + body]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", stopping.SIGNALS)
def test_signal_is_a_request(requests, number):
    assert requests.requested is None
    os.kill(os.getpid(), number)
    wait_for(lambda: requests.requested == signal.Signals(number).name)
    os.kill(os.getpid(), number)  # the same request by another path: this process continues


def test_signal_handlers_are_restored_after_a_failed_fit():
    requests, later, before = stopping.StopSignals(), stopping.StopSignals(), []

    def fit(requests, number):
        requests.listen()
        if number:
            os.kill(os.getpid(), number)
            wait_for(lambda: requests.requested)
        raise ValueError

    earlier = signal.signal(signal.SIGUSR1, lambda *_: before.append(True))
    try:
        with pytest.raises(ValueError):
            fit(requests, signal.SIGUSR1)
        assert not before
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_for(lambda: before)
        with pytest.raises(ValueError):
            fit(later, None)
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_for(lambda: len(before) == 2)
        assert later.requested is None
    finally:
        signal.signal(signal.SIGUSR1, earlier)


def test_handlers_exist_only_between_listen_and_close():
    before = {number: signal.getsignal(number) for number in stopping.SIGNALS}
    running = set(threading.enumerate())  # other tests may have left theirs
    requests = stopping.StopSignals()
    requests.listen()
    requests.listen()
    assert all(signal.getsignal(number) is not handler for number, handler in before.items())
    requests.close()
    requests.close()
    assert {number: signal.getsignal(number) for number in stopping.SIGNALS} == before
    wait_for(lambda: set(threading.enumerate()) <= running)


def test_close_waits_for_a_signal_that_is_being_handled(requests, monkeypatch):
    closing, handle, join = threading.Event(), requests._handle_stop, threading.Thread.join

    def handle_late(number):
        closing.wait(10)
        handle(number)

    def joining(thread, *limit):
        closing.set()
        join(thread, *limit)

    monkeypatch.setattr(requests, "_handle_stop", handle_late)
    monkeypatch.setattr(threading.Thread, "join", joining)
    os.kill(os.getpid(), signal.SIGUSR1)
    requests.close()
    requested = requests.requested
    closing.set()
    assert requested == "SIGUSR1"


FORK = """
read, write = os.pipe()
child = os.fork()
if child == 0:
    os.write(write, b"x")
    time.sleep(20)
    os._exit(1)
os.read(read, 1)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_thread_ends_although_a_child_has_its_socket():
    requests = stopping.StopSignals()
    before = {*threading.enumerate()}
    requests.listen()
    (thread,) = {*threading.enumerate()} - before
    copy = os.dup(requests._sockets[1].fileno())  # as in a child that was forked meanwhile
    requests.close()
    thread.join(10)
    os.close(copy)
    assert not thread.is_alive()


def test_forked_child_keeps_its_signals():
    """A multiprocessing pool that loads data ends its processes by SIGTERM."""
    body = """
time.sleep(0.2)
print(requests.requested)
os.kill(os.getpid(), signal.SIGTERM)  # in the parent it is a request
end = time.monotonic() + 10
while requests.requested is None and time.monotonic() < end:
    time.sleep(0.02)
print(requests.requested)
"""
    with script(FORK + body) as process:
        out, err = process.communicate(timeout=30)
    assert out.split() == [str(int(-signal.SIGTERM)), "None", "SIGTERM"], err


def test_forked_child_ends_by_sigterm_with_a_c_handler():
    """TensorFlow's multi-worker strategy installs such a handler."""
    ignores = """
requests.close()
libc = ctypes.CDLL(None)
libc.signal(signal.SIGTERM, libc.abs)
"""
    with script(ignores + FORK) as process:
        out, err = process.communicate(timeout=30)
    assert out == f"{-signal.SIGTERM}\n", err


def test_handler_of_faulthandler_is_restored():
    """Python does not know of it. A child inherits it."""
    body = """
import faulthandler
requests.close()
faulthandler.register(signal.SIGUSR1, all_threads=False, chain=False)
requests.listen()
child = os.fork()
if child == 0:
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
requests.close()
os.kill(os.getpid(), signal.SIGUSR1)
print(requests.requested)
"""
    with script(body) as process:
        out, err = process.communicate(timeout=30)
    assert out.split() == [str(int(-signal.SIGTERM)), "None"], err
    assert err.count("most recent call first") == 2


def test_can_be_pickled():
    """A notebook's callbacks are sent to its workers."""
    assert pickle.loads(pickle.dumps(stopping.StopSignals())).requested is None


def test_earlier_handlers_are_still_called():
    requests = stopping.StopSignals()
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write)
    try:
        requests.listen()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert os.read(read, 1) == bytes([signal.SIGUSR1])
        requests.close()
        assert signal.set_wakeup_fd(before) == write
    finally:
        signal.set_wakeup_fd(before)
        os.close(read)
        os.close(write)


def test_outside_the_main_thread_it_warns(caplog):
    requests = stopping.StopSignals()
    thread = threading.Thread(target=requests.listen)
    thread.start()
    thread.join()
    assert "does not run in the main thread" in caplog.text
    requests.close()


def test_stopped_exits_with_the_exit_code():
    body = "try:\n    raise stopping.Stopped\nexcept Exception:\n    sys.exit(3)"
    with script(body) as process:
        assert process.wait(20) == stopping.EXIT_CODE == 75


# Between bytecodes, and in a C call that Python handlers cannot interrupt.
WAITS = {
    "python": "while True:\n    time.sleep(0.01)",
    "c": "mutex = ctypes.create_string_buffer(64)\n"
    "lock = ctypes.CDLL(None).pthread_mutex_lock\nlock(mutex)\nlock(mutex)",
}


@pytest.mark.parametrize("waits", WAITS)
def test_second_signal_ends_the_process_at_once(waits):
    with script("print('ready', flush=True)\n" + WAITS[waits]) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
        assert "SIGUSR1: all workers" in process.stderr.readline()
        time.sleep(0.4)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 128 + signal.SIGTERM


@pytest.mark.parametrize("first", stopping.SIGNALS)
def test_sigusr1_is_ignored_after_a_request(first):
    """The launcher of an elastic job repeats it."""
    with script("print('ready', flush=True)\nwhile True:\n    time.sleep(0.01)") as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(first)
        assert f"{first.name}: all workers" in process.stderr.readline()
        for _ in range(2):
            time.sleep(0.4)
            process.send_signal(signal.SIGUSR1)
        time.sleep(0.2)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 128 + signal.SIGTERM
