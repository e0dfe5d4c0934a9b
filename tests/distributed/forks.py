"""Forks worker processes from one server process that has imported everything.

Imports take longer than most test programs. `command` returns a light process that asks a server
for a fork, forwards its output, environment, network and signals, and exits with the fork's status.
To the test it looks like a normal worker. TensorFlow starts its threads on first use, hence in the
fork. Parallel test processes share the servers, see `keep_servers`.
"""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import hashlib
import json
import os
import runpy
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

_POLL_SECONDS = 0.02
_PR_SET_PDEATHSIG = 1
_NETWORK = "/proc/self/ns/net"
_LENGTH = 8  # digits of a request's length field
_FOLDER_VARIABLE = "TF_REDSYNC_TEST_FORKS"  # folder of the servers of all test processes
_ALIVE = "alive"  # FIFO in that folder; reads end when the process that created it exits
_GARBAGE_THRESHOLDS = (50_000, 20, 50)
_KEPT = []


def freeze_garbage():
    """Excludes existing objects from garbage collection and raises its thresholds.

    A full collection takes half a second in a process with TensorFlow. In a fork it also copies
    memory pages.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GARBAGE_THRESHOLDS)


def keep_servers():
    """Creates the folder of servers for this process and all that inherit its environment.

    The servers end with this process, even if another one started them.
    """
    folder = tempfile.mkdtemp(prefix="forks")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    alive = Path(folder, _ALIVE)
    os.mkfifo(alive)
    os.open(alive, os.O_RDWR)  # open until the process ends; then readers see the end of file
    os.environ[_FOLDER_VARIABLE] = folder


def command(environment, script, *args):
    """The command that runs `script` with `args` in a fork.

    Args:
      environment: variables that must be set when TensorFlow is imported. Each set has its server.
      script: path of a Python file.
      *args: its command line.
    """
    return [*_asking(environment), str(script), *args]


def python(environment, folder):
    """Path of a program in `folder` that runs `-m MODULE ...` or `SCRIPT ...` in a fork."""
    path = Path(folder, "python")
    path.write_text(f'#!/bin/sh\nexec {shlex.join(_asking(environment))} "$@"\n')
    path.chmod(0o755)
    return str(path)


def _asking(environment):
    address = _server(tuple(sorted(environment.items())))
    return [sys.executable, "-I", "-S", __file__, "ask", address]


@functools.cache
def _server(environment):
    if _FOLDER_VARIABLE not in os.environ:
        keep_servers()
    folder = Path(os.environ[_FOLDER_VARIABLE])
    name = hashlib.sha256(repr(environment).encode()).hexdigest()[:16]
    address, log = folder / name, folder / f"{name}.log"
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one test process starts it, the others wait
        if not address.exists():
            with open(folder / _ALIVE) as alive, open(log, "w") as errors:
                server = subprocess.Popen(
                    [sys.executable, __file__, "serve", str(address)],
                    env={**os.environ, "OMP_NUM_THREADS": "1", **dict(environment)},
                    stdin=alive,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
            if server.stdout.readline() != "ready\n":
                raise RuntimeError(f"The server of forks did not start:\n{log.read_text()}")
            _KEPT.append(server)
    return str(address)


def _ask(address, *argv):
    """Requests a fork that runs `argv`, forwards signals to it, and exits with its status."""
    request = json.dumps({"argv": argv, "env": dict(os.environ), "cwd": os.getcwd()}).encode()
    network = os.open(_NETWORK, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [b"%*d" % (_LENGTH, len(request))], [1, 2, network])
        connection.sendall(request)
        answers = connection.makefile("r")
        child = int(answers.readline())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, lambda number, _: _send(child, number))
        code = int(answers.readline() or 1)
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _send(process, number):
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def _serve(address):
    """Forks for every request. Returns only in the forks, with the command to run."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    print("ready", flush=True)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)
    children = {}
    while True:
        for key, _ in selector.select(_POLL_SECONDS if children else None):
            if key.fileobj is listener:
                connection, _ = listener.accept()
                child, request = _fork(connection)
                if child is None:
                    connection.close()
                    continue
                if not child:
                    selector.close()
                    for inherited in (listener, connection, *children.values()):
                        inherited.close()
                    return _become(request)
                children[child] = connection
                selector.register(connection, selectors.EVENT_READ, child)
            elif key.data:  # the client is gone
                selector.unregister(key.fileobj)
                os.kill(key.data, signal.SIGKILL)
            else:  # the test run is over
                for child in children:
                    os.kill(child, signal.SIGKILL)
                os._exit(0)
        for child in list(children):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                connection = children.pop(child)
                if connection in selector.get_map():
                    selector.unregister(connection)
                    with contextlib.suppress(OSError):  # the client has been killed
                        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
                connection.close()


def _fork(connection):
    """Forks; returns (0 in the fork, as `os.fork`, and the request); `None` for a dead client."""
    length, files, _, _ = socket.recv_fds(connection, _LENGTH, 3)
    text = b""
    while not length or len(text) < int(length):
        part = connection.recv(1 << 16)
        if not part:
            for file in files:
                os.close(file)
            return None, None
        text += part
    server, child = os.getpid(), os.fork()
    if child:
        for file in files:
            os.close(file)
        with contextlib.suppress(OSError):
            connection.sendall(b"%d\n" % child)
    else:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            os._exit(1)
    return child, (json.loads(text), files)


def _become(request):
    """Takes over the client's files, environment, folder and network; runs in the fork."""
    import numpy as np

    options, (out, error, network) = request
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(error, 2)
    os.close(out)
    os.close(error)
    if os.fstat(network).st_ino != os.stat(_NETWORK).st_ino:
        if ctypes.CDLL(None, use_errno=True).setns(network, 0):
            raise OSError(ctypes.get_errno(), "setns")
    os.close(network)
    os.environ.clear()
    os.environ.update(options["env"])
    os.chdir(options["cwd"])
    np.random.seed()  # numpy has no fork hook, unlike `random`
    return options["argv"]


def _import():
    """Imports what most test programs import."""
    import keras  # noqa: F401
    import tensorflow  # noqa: F401
    import tf_keras  # noqa: F401

    import tf_redsync

    for name in tf_redsync.__all__:  # imported lazily
        getattr(tf_redsync, name)
    freeze_garbage()


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        _ask(*sys.argv[2:])
    _import()
    sys.argv = _serve(sys.argv[2])
    if sys.argv[0] == "-m":
        del sys.argv[0]
        sys.path[0] = os.getcwd()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
