"""Worker processes as forks of one process that has imported everything and started nothing.

Imports take longer than most programs of the tests. `command` makes a light process that asks a
server for a fork, hands over its output, environment, network and signals, and ends as the fork
does: who started it sees a worker like any other. TensorFlow starts its threads when it is first
used, hence in the fork. Test processes side by side share the servers, see `keep_servers`.
"""

import atexit
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
_LENGTH = 8  # digits of the length of a request
_FOLDER_VARIABLE = "TF_REDSYNC_TEST_FORKS"  # where the servers of all test processes are
_ALIVE = "alive"  # a FIFO there: it ends with the process that made the folder
_GARBAGE_THRESHOLDS = (50_000, 20, 50)
_KEPT = []


def freeze_garbage():
    """What is there by now is no garbage, and what comes is seldom searched.

    A search through TensorFlow takes half a second, and in a fork copies its pages; a graph under
    way is not garbage either.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GARBAGE_THRESHOLDS)


def keep_servers():
    """Makes the folder of servers for this process and those that inherit its environment.

    The servers end with this process, whichever process has started them.
    """
    folder = tempfile.mkdtemp(prefix="forks")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    alive = Path(folder, _ALIVE)
    os.mkfifo(alive)
    os.open(alive, os.O_RDWR)  # kept until the process ends; who reads it sees the end
    os.environ[_FOLDER_VARIABLE] = folder


def command(environment, script, *args):
    """The words that run `script` with `args` in a fork.

    Args:
      environment: variables that must stand when TensorFlow is imported. There is one server for
        each set of them.
      script: path of a Python file.
      *args: its command line.
    """
    return [*_asking(environment), str(script), *args]


def python(environment, folder):
    """The path of a program in `folder` that runs `-m MODULE ...` or `SCRIPT ...` in a fork."""
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
    """Asks for a fork that runs `argv`, passes signals on to it, and ends as it does."""
    request = json.dumps({"argv": argv, "env": dict(os.environ), "cwd": os.getcwd()}).encode()
    network = os.open(_NETWORK, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [b"%*d" % (_LENGTH, len(request))], [1, 2, network])
        connection.sendall(request)
        answers = connection.makefile("r")
        child = int(answers.readline())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, lambda number, _: os.kill(child, number))
        code = int(answers.readline() or 1)
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _serve(address):
    """Forks for every request. Returns in the forks alone, with the words to run."""
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
                if not child:
                    selector.close()
                    for inherited in (listener, connection, *children.values()):
                        inherited.close()
                    return _become(request)
                children[child] = connection
                selector.register(connection, selectors.EVENT_READ, child)
            elif key.data:  # who asked for it is gone
                selector.unregister(key.fileobj)
                os.kill(key.data, signal.SIGKILL)
            else:  # the tests are over
                for child in children:
                    os.kill(child, signal.SIGKILL)
                os._exit(0)
        for child in list(children):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                connection = children.pop(child)
                if connection in selector.get_map():
                    selector.unregister(connection)
                    connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
                connection.close()


def _fork(connection):
    """Forks; returns 0 in the fork, as `os.fork`, and the request."""
    length, files, _, _ = socket.recv_fds(connection, _LENGTH, 3)
    text = b""
    while len(text) < int(length):
        text += connection.recv(1 << 16)
    server, child = os.getpid(), os.fork()
    if child:
        for file in files:
            os.close(file)
        connection.sendall(b"%d\n" % child)
    else:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            os._exit(1)
    return child, (json.loads(text), files)


def _become(request):
    """In the fork: takes on the files, the environment, the folder and the network of who asked."""
    import numpy as np

    wanted, (out, error, network) = request
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
    os.environ.update(wanted["env"])
    os.chdir(wanted["cwd"])
    np.random.seed()  # it has no hook for forks, as `random` has
    return wanted["argv"]


def _import():
    """Imports what most programs of the tests do."""
    import keras  # noqa: F401
    import tensorflow  # noqa: F401
    import tf_keras  # noqa: F401

    import tf_redsync

    for name in tf_redsync.__all__:  # these are imported when they are asked for
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
