"""Workers on other machines over SSH: hosts, connections and start.

`remote.py` is the program at the other end of a connection.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from tf_redsync import environment
from tf_redsync.cli import worker_environment
from tf_redsync.cli.output import Output
from tf_redsync.cli.processes import Job, Worker
from tf_redsync.cli.remote import MARK
from tf_redsync.cli.restarts import NotStarted, Restarts

# Prefixes of the variables that are forwarded to other machines: those of Python, TensorFlow and
# its libraries. Other variables may name files or secrets of this machine; --env forwards more.
FORWARDED = ("TF_", "KERAS_", "XLA_", "NCCL_", "GRPC_", "OMP_", "CUDA_", "PYTHON")
_ALIVE_SECONDS = 10
_ALIVE_COUNT = 3  # the default of ssh
SSH = f"ssh -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval={_ALIVE_SECONDS}"
_HOST = re.compile(r"(?:[^\s@:/-][^\s@:/]*@)?(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_][A-Za-z0-9_.-]*)")
_LOOPBACK = re.compile(r"localhost|127\.\d+\.\d+\.\d+|\[::1\]")


@dataclasses.dataclass(frozen=True)
class Host:
    """A machine that runs workers.

    Attributes:
        name: Name for `ssh`: `host` or `user@host`.
        workers: Number of workers.
    """

    name: str
    workers: int

    @property
    def address(self) -> str:
        """Name or IP address for other machines."""
        return self.name.rpartition("@")[2]


def parse(text: str) -> list[Host]:
    """Return the hosts of `--hosts`, such as `a:2,b:2`. A host without a number has one worker.

    Raises:
        ValueError: the text is malformed or names a host twice.
    """
    return _checked([_host(part.strip(), "--hosts") for part in text.split(",")], text)


def read(path: str) -> list[Host]:
    """Return the hosts of a file with lines `a:2`, or `a slots=2` as for MPI, and `#` comments.

    Raises:
        ValueError: the file cannot be read or a line is malformed.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"`--hostfile` cannot be read: {error}. Received: {path!r}") from error
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"--hostfile {path}, line {number}"
        slots = [word.partition("=")[2] for word in words[1:] if word.startswith("slots=")]
        if len(words) > 2 or len(slots) != len(words) - 1:
            raise ValueError(f"a line must be `a:2` or `a slots=2`. Received: {line!r} ({where})")
        hosts.append(_host(":".join([words[0], *slots]), where))
    return _checked(hosts, path)


def _host(text: str, where: str) -> Host:
    name, colon, count = text.rpartition(":")
    if not colon or (count.endswith("]") and text.count("[") == 1):
        name, count = text, "1"
    if not _HOST.fullmatch(name) or not count.isdecimal() or int(count) < 1:
        raise ValueError(
            "a host must be `name` or `name:workers`, such as a:2 or user@10.0.0.1:2. Received: "
            f"{text!r} ({where})"
        )
    return Host(name, int(count))


def _checked(hosts: list[Host], received: str) -> list[Host]:
    names = [host.address for host in hosts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if not hosts or twice:
        problem = f"{twice[0]!r} is given twice; add up its workers" if twice else "there are none"
        raise ValueError(f"hosts must be given, each once: {problem}. Received: {received!r}")
    local = [name for name in names if _LOOPBACK.fullmatch(name)]
    if local and len(local) < len(names):
        raise ValueError(
            f"{local[0]!r} is a different machine on every host. Use this machine's name or IP "
            f"address in your network. Received: {received!r}"
        )
    return hosts


def forwarded_environment(
    names: Sequence[str], environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the variables that are forwarded to workers on other machines.

    Args:
        names: Further variables, as `NAME` or `NAME=VALUE`.
        environ: This process's environment.

    Raises:
        ValueError: a `NAME` is not set.
    """
    forwarded = {
        name: value
        for name, value in environ.items()
        if name.startswith(FORWARDED) and name != "TF_CONFIG"
    }
    for text in names:
        name, separator, value = text.partition("=")
        if not name or (not separator and name not in environ):
            raise ValueError(
                f"`--env` must be NAME=VALUE, or the name of a variable that is set. Received: "
                f"--env {text}"
            )
        forwarded[name] = value if separator else environ[name]
    return forwarded


def default_command(env: Mapping[str, str]) -> str:
    """Return the SSH command of workers with these variables.

    It keeps a connection whose link is down for half of the heartbeat, as the workers do.

    Raises:
        ValueError: the heartbeat is not a number of seconds.
    """
    heartbeat = environment.seconds(environment.HEARTBEAT, None, environment.HEARTBEAT, environ=env)
    count = int(min(heartbeat or 0.0, 1e6) / 2 / _ALIVE_SECONDS)
    return f"{SSH} -o ServerAliveCountMax={count}" if count > _ALIVE_COUNT else SSH


def working_directory() -> str:
    """Return the working directory as the shell names it.

    Other machines may have its symbolic links, such as /home, but not their targets.
    """
    name = os.environ.get("PWD", "")
    with contextlib.suppress(OSError):  # PWD is not set, or its folder is gone
        if os.path.isabs(name) and os.path.samefile(name, "."):
            return name
    return os.getcwd()


def command(host: Host, ssh: str, python: str) -> list[str]:
    """Return the command that starts the launcher's agent on a host.

    The agent receives the job through its standard input, so that no shell parses it and no list of
    processes shows it.
    """
    path = os.environ.get("PYTHONPATH")
    words = ["env", f"PYTHONPATH={path}"] if path else []
    words += [python, "-m", "tf_redsync.cli.remote"]
    return [*shlex.split(ssh), host.name.replace("[", "").replace("]", ""), shlex.join(words)]


ANSWER_SECONDS = 60.0  # from the start of ssh to the agent's answer
# How long failed connections are opened again. The first start fails early, because the name of a
# host or its keys may be wrong. In a restart the host may have rebooted.
FIRST_SECONDS = 10.0
RESTART_SECONDS = 60.0
AT_A_TIME = 8  # connections per host without an answer; sshd drops some of 11 (MaxStartups)
_AGAIN_SECONDS = 2.0  # pause before a connection is opened again
_LASTING = ("Permission denied", "Host key verification failed")  # another attempt cannot help
_KILL_SECONDS = 5.0  # from SIGKILL for the worker to SIGKILL for its ssh
_POLL_SECONDS = 0.05


class HostError(OSError):
    """A host cannot be used; the message has its name and the remedy."""


class ConnectionFailed(HostError):
    """`ssh` has failed before the agent answered; another attempt may succeed."""


class RemoteWorker(Worker):
    """A worker on another machine: an `ssh` process connected to `cli/remote.py`."""

    def __init__(
        self,
        index: int,
        host: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: Path | None,
        printer: Callable[[bytes], None] | None,
        attempt: int = 0,
    ):
        self.host = host
        self.where = f" on {host}"
        self._argv = list(argv)
        self._held = b""
        self._has_job = False
        self._said: dict[str, Any] = {}
        self._kill_at: float | None = None
        super().__init__(index, argv, env, log, None, attempt, stdin=subprocess.PIPE)
        self._printer_then = printer  # used once the agent answers, to drop output of ssh and shell

    def answered(self) -> bool:
        """Return whether the agent has answered.

        Raises:
            ConnectionFailed: the connection has failed.
            HostError: the agent has ended, or has not answered in time.
        """
        at_end = self.read() == 0
        if "version" in self._said:
            return True
        if at_end or self.ended():
            self.wait()
            while self.read() > 0:
                pass
            raise self._failure()
        if time.monotonic() > self._start + ANSWER_SECONDS:
            raise HostError(
                f"host {self.host} did not answer within {ANSWER_SECONDS:g} s. Check that "
                f"`{shlex.join(self._argv[:-1])} true` ends at once."
            )
        return False

    def begin(self, job: Mapping[str, Any]) -> None:
        """Send the job to the agent, which starts the worker; `cli/remote.py` has its fields."""
        self._has_job = True
        self._write(json.dumps(job))

    def _failure(self) -> HostError:
        text = self.tail(5).strip() or "(no output)"
        command, python = shlex.join(self._argv[:-1]), shlex.split(self._argv[-1])[-3]
        # WNOWAIT: `finish` reaps this process.
        status = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        code = status.si_status if status else 0
        kind = HostError
        if "No module named" in text:
            todo = f"{python} has no tf_redsync. Install it, or pass another --python"
        elif code == 255:
            if not any(lasting in text for lasting in _LASTING):
                kind = ConnectionFailed
            todo = f"the connection failed. Make `{command} true` work without a password"
            if "closed by" in text or "reset by" in text:
                todo += ", and raise MaxStartups of its sshd if that drops connections"
        elif code in (126, 127):
            todo = f"the interpreter {python} does not exist. Pass --python"
        else:
            todo = f"the launcher's agent did not start (exit code {code})"
        return kind(f"host {self.host}: {todo}. Output: {text}")

    def _write(self, text: str) -> None:
        pipe = self.process.stdin
        assert pipe is not None
        with contextlib.suppress(OSError, ValueError):  # the agent is gone: `Job` reports it
            pipe.write(text.encode() + b"\n")
            pipe.flush()

    @override
    def received(self, data: bytes) -> None:
        """Separate the agent's messages from the worker's output."""
        text, self._held = self._held + data, b""
        while True:
            before, mark, after = text.partition(MARK[:1])
            super().received(before)
            line, newline, rest = after.partition(b"\n")
            if not mark:
                return
            whole = mark + after
            if whole.startswith(MARK) and newline:
                self._said |= json.loads(whole[len(MARK) :].partition(b"\n")[0])
                self._printer = self._printer_then
                text = rest
            elif whole.startswith(MARK) or MARK.startswith(whole):
                self._held = whole
                return
            else:  # output of the worker that contains the first byte of the mark
                super().received(mark)
                text = after

    @override
    def send(self, number: int) -> None:
        if not self._has_job:  # the agent ends with its input
            super().send(number)
        elif self.returncode is None:
            self._write(str(int(number)))
            if number == signal.SIGKILL and self._kill_at is None:
                self._kill_at = time.monotonic() + _KILL_SECONDS

    @override
    def ended(self) -> bool:
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            super().send(signal.SIGKILL)
        return super().ended()

    @override
    def wait(self) -> None:
        while not self.ended():
            self.read()
            time.sleep(_POLL_SECONDS)

    @override
    def finish(self) -> None:
        super().finish()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        if "ended" in self._said:
            self.returncode = self._said["ended"]


class _Connection:
    """The connection to one agent, which is opened again after a failure.

    Args:
        place: Place of the worker.
        host: Name of the host.
        seconds: Seconds in which failed connections are opened again.
        connect: Starts `ssh`.

    Attributes:
        worker: The worker; `None` while there is no connection.
        answered: Whether the agent has answered.
    """

    def __init__(self, place: int, host: str, seconds: float, connect: Callable[[], RemoteWorker]):
        self.place = place
        self.host = host
        self.worker: RemoteWorker | None = None
        self.answered = False
        self._connect = connect
        self._seconds = seconds
        self._first = 0.0  # time of the first attempt
        self._next = 0.0  # time of the next attempt

    def advance(self, may_open: bool) -> str:
        """Open the connection or check it; return the reason if it has failed.

        Raises:
            NotStarted: the host cannot be used.
        """
        try:
            if self.worker is not None:
                self.answered = self.worker.answered()
            elif may_open and time.monotonic() >= self._next:
                self.worker = self._connect()
                self._first = self._first or time.monotonic()
        except OSError as error:
            left = self._first + self._seconds - time.monotonic()
            if not isinstance(error, ConnectionFailed) or left <= 0:
                raise NotStarted(self.place, error) from error
            self.close()
            self._next = time.monotonic() + min(_AGAIN_SECONDS, left)
            return f"{error}. New connections are opened for up to {left:.0f} s."
        return ""

    def close(self) -> None:
        """End `ssh`."""
        if self.worker is not None:
            self.worker.send(signal.SIGKILL)
            self.worker.wait()
            self.worker.finish()
            self.worker = None


def _open_all(connections: Sequence[_Connection], job: Job) -> list[RemoteWorker]:
    """Open all connections, few at a time per host; return the workers.

    Raises:
        NotStarted: a host cannot be used.
        Cancelled: a signal or the timeout ends the job before.
    """
    reported: set[str] = set()
    try:
        while waiting := [each for each in connections if not each.answered]:
            job.check()
            for each in waiting:
                opening = sum(one.host == each.host and one.worker is not None for one in waiting)
                problem = each.advance(may_open=opening < AT_A_TIME)
                if problem and each.host not in reported:
                    reported.add(each.host)
                    job.say(problem)
            time.sleep(_POLL_SECONDS)
    except BaseException:
        for each in connections:
            each.close()
        raise
    return [each.worker for each in connections if each.worker is not None]


@dataclasses.dataclass(frozen=True)
class Remote:
    """Settings of a job over SSH.

    Attributes:
        hosts: The machines.
        ssh: The SSH command with its options.
        python: Path of the interpreter on all machines.
        port: Port of the first worker of each machine; `None` for a port that is free on this
            machine, a new one at each restart.
        env: Variables for the workers.
    """

    hosts: Sequence[Host]
    ssh: str
    python: str
    port: int | None
    env: Mapping[str, str]

    @property
    def workers(self) -> int:
        """Number of workers on all hosts."""
        return sum(host.workers for host in self.hosts)


@dataclasses.dataclass(frozen=True)
class SSHStart:
    """Starts workers on other machines.

    Attributes:
        command: Command of every worker, after the interpreter.
        remote: Hosts and connection.
        threads: Threads per worker; `None` for the machine's cores divided by its workers.
        cores_per_worker: Number of cores per worker; `None` for all.
        output: Destination of the workers' output.
        restarts: Attempt number and workers to start.
    """

    command: Sequence[str]
    remote: Remote
    threads: int | None
    cores_per_worker: int | None
    output: Output
    restarts: Restarts

    def __call__(self, job: Job) -> None:
        """Start the workers of an attempt after all hosts have answered.

        Raises:
            NotStarted: a host cannot be used.
            Cancelled: a signal or the timeout ends the job before.
        """
        every = [host for host in self.remote.hosts for _ in range(host.workers)]
        places = self.restarts.places
        used = [every[place] for place in places]
        slots = [used[:i].count(host) for i, host in enumerate(used)]
        port = self.remote.port or worker_environment.free_ports(1)[0]
        at = [f"{host.address}:{port + slot}" for host, slot in zip(used, slots, strict=True)]
        workers = self._connect(job, used)
        for worker in workers:
            job.add(worker)
        for i, worker in enumerate(workers):
            attempt = {environment.RESTART: str(self.restarts.attempt)}
            worker.begin(
                {
                    "argv": list(self.command),
                    "cwd": working_directory(),
                    "env": dict(self.remote.env),
                    "own": {"TF_CONFIG": worker_environment.tf_config(at, i), **attempt},
                    "workers": used.count(used[i]),
                    "slot": slots[i],
                    "gpus": [every[: places[i]].count(used[i]), used[i].workers],
                    "threads": self.threads or self.cores_per_worker,
                    "cores": self.cores_per_worker,
                }
            )

    def _connect(self, job: Job, used: Sequence[Host]) -> list[RemoteWorker]:
        def connect(index: int) -> RemoteWorker:
            words = command(used[index], self.remote.ssh, self.remote.python)
            log, printer = self.output.log(index), self.output.printer(index)
            name, attempt = used[index].name, self.restarts.attempt
            return RemoteWorker(index, name, words, os.environ, log, printer, attempt)

        seconds = RESTART_SECONDS if self.restarts.attempt else FIRST_SECONDS
        connections = [
            _Connection(place, host.name, seconds, functools.partial(connect, i))
            for i, (place, host) in enumerate(zip(self.restarts.places, used, strict=True))
        ]
        return _open_all(connections, job)
