"""The machines of a job that is started over SSH: which they are, and how to reach them."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

# Variables of this process that workers on other machines get as well: of Python, TensorFlow and
# what it is made of. Others may name files or secrets of this machine; --env names more.
FORWARDED = ("TF_", "KERAS_", "XLA_", "NCCL_", "GRPC_", "OMP_", "CUDA_", "PYTHON")
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=10"
_HOST = re.compile(r"(?:[^\s@:/]+@)?(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_][A-Za-z0-9_.-]*)")
_LOOPBACK = re.compile(r"localhost|127\.\d+\.\d+\.\d+|\[::1\]")


@dataclasses.dataclass(frozen=True)
class Host:
    """A machine.

    Attributes:
        name: As `ssh` takes it: `host` or `user@host`.
        workers: How many are started on it.
    """

    name: str
    workers: int

    @property
    def address(self) -> str:
        """What other machines call it."""
        return self.name.rpartition("@")[2]


def parse(text: str) -> list[Host]:
    """Returns the hosts of `--hosts`, such as `a:2,b:2`; one worker where there is no number.

    Raises:
        ValueError: for anything else.
    """
    return _checked([_host(part.strip(), "--hosts") for part in text.split(",")], text)


def read(path: str) -> list[Host]:
    """Returns the hosts of a file: `a:2`, or `a slots=2` as for MPI, a line; `#` begins a comment.

    Raises:
        ValueError: for a file that is not there, or a line of another form.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"`--hostfile` cannot be read: {error}. Received: {path!r}") from error
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"--hostfile {path}, line {number}"
        slots = [word.partition("=")[2] for word in words[1:] if word.startswith("slots=")]
        if len(words) > 2 or len(slots) != len(words) - 1:
            raise ValueError(
                f"a line must be a host, `a:2` or `a slots=2`. Received: {line!r} ({where})"
            )
        found.append(_host(":".join([words[0], *slots]), where))
    return _checked(found, path)


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


def _checked(hosts: list[Host], given: str) -> list[Host]:
    names = [host.address for host in hosts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if not hosts or twice:
        what = f"{twice[0]!r} is there twice; give the sum of its workers" if twice else "none"
        raise ValueError(f"there must be hosts, each once: {what}. Received: {given!r}")
    local = [name for name in names if _LOOPBACK.fullmatch(name)]
    if local and len(local) < len(names):
        raise ValueError(
            f"{local[0]!r} is another machine on every machine: name this one as the others see "
            f"it. Received: {given!r}"
        )
    return hosts


def environment(names: Sequence[str], own: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns what workers on other machines get of this process's environment.

    Args:
        names: Further variables, as `NAME`, or `NAME=VALUE`.
        own: This process's.

    Raises:
        ValueError: for a name that is not set.
    """
    found = {
        name: value
        for name, value in own.items()
        if name.startswith(FORWARDED) and name != "TF_CONFIG"
    }
    for text in names:
        name, given, value = text.partition("=")
        if not name or (not given and name not in own):
            raise ValueError(
                f"`--env` must be NAME=VALUE, or the name of a variable that is set here. Received:"
                f" --env {text}"
            )
        found[name] = value if given else own[name]
    return found


def command(host: Host, ssh: str, python: str) -> list[str]:
    """Returns the words that start the launcher's part on a host.

    What runs there, where and with which variables, it is told through its standard input: no
    shell reads it, and nobody sees it in a list of processes.
    """
    path = os.environ.get("PYTHONPATH")
    words = ["env", f"PYTHONPATH={path}"] if path else []
    words += [python, "-m", "tf_redsync.cli.remote"]
    return [*shlex.split(ssh), host.name.replace("[", "").replace("]", ""), shlex.join(words)]
