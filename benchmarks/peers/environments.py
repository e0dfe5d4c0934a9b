"""Virtual environments of the peers: created once with each library's requirements."""

from __future__ import annotations

import collections
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.common import Peer
from tf_redsync.cli.processes import Job, TimeLimits, Worker

STAMP = "peer.json"  # in the environment; written last, so without it the environment is incomplete


class InstallError(RuntimeError):
    """A peer cannot be installed; the first line of the message is the reason."""


def ensure(peer: Peer, folder: Path, timeout: float) -> Path:
    """Returns the Python of the peer's environment, creating it if necessary.

    Args:
      peer: the library.
      folder: parent folder of the environments, each named after its peer, and of the install logs.
      timeout: seconds for every command, then its processes get SIGKILL.

    Returns:
      The path of the interpreter.

    Raises:
      InstallError: with the reason and the path of the log.
    """
    target = (folder / peer.name).absolute()
    python, stamp = target / "bin" / "python", target / STAMP
    base = interpreter(peer.pythons)
    recipe = _recipe(peer, base)
    if stamp.is_file() and python.exists() and json.loads(stamp.read_text("utf-8")) == recipe:
        return python
    _check_tools(peer.tools)
    if target.exists():
        if not (target / "pyvenv.cfg").is_file():
            raise InstallError(f"{target} is no virtual environment: remove it, or use --venvs")
        shutil.rmtree(target)
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    commands = [[base, "-m", "venv", str(target)]]
    commands += [pip_install(python, words) for words in peer.installs]
    environment = _environment(os.environ, target, peer.environment)
    for i, command in enumerate(commands):
        print(f"{peer.name}: {' '.join(command)}", flush=True)
        _run(command, environment, folder / f"{peer.name}-{i}.log", timeout)
    stamp.write_text(json.dumps(recipe, indent=1), encoding="utf-8")
    print(f"{peer.name}: installed into {target} in {time.monotonic() - start:.0f} s", flush=True)
    return python


def pip_install(python: Path, words: Sequence[str]) -> list[str]:
    """Returns the command of one `pip install`, with low priority for builds."""
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    return ["nice", "-n", "10", *pip, "--progress-bar", "off", *words]


def interpreter(versions: Sequence[str]) -> str:
    """Returns a Python to create an environment with.

    Args:
      versions: accepted versions such as "3.11", the best first; empty: the running one.

    Raises:
      InstallError: none of them is installed.
    """
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    if not versions or own in versions:
        return sys.executable
    for version in versions:
        found = shutil.which(f"python{version}")
        if found:
            return found
    wanted = " or ".join(versions)
    raise InstallError(f"needs Python {wanted}: this is {own}, and no other is on the PATH")


def _recipe(peer: Peer, base: str) -> dict[str, Any]:
    """The recipe of an environment; it is recreated if the recipe has changed."""
    return {
        "python": os.path.realpath(base),
        "installs": [list(words) for words in peer.installs],
        "environment": dict(peer.environment),
    }


def _check_tools(tools: Mapping[str, str]) -> None:
    missing = [reason for tool, reason in tools.items() if shutil.which(tool) is None]
    if missing:
        raise InstallError(f"needs {' and '.join(missing)}")


def _environment(base: Mapping[str, str], target: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """Variables of an install: the environment's own programs first, no other packages."""
    kept = {k: v for k, v in base.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    path = os.pathsep.join([str(target / "bin"), base.get("PATH", os.defpath)])
    return {**kept, "PATH": path, "VIRTUAL_ENV": str(target), **extra}


def _run(command: Sequence[str], environment: Mapping[str, str], log: Path, timeout: float) -> None:
    """Runs one command; its processes end with it or with this process."""
    limits = TimeLimits(timeout, grace=5, stop_grace=5)
    job = Job(limits, echo=False, signals=collections.deque())
    try:
        job.add(Worker(0, command, environment, log, None))
        result = job.supervise()
    finally:
        job.close()
    if result.exit_code:
        lines = result.workers[0].output.strip().splitlines() or ["no output"]
        errors = [line.strip() for line in lines if "error" in line.lower()]
        reason = errors[-1] if errors else lines[-1]
        if result.exit_code == 124:
            reason = f"not done after {timeout:g} s (--install_timeout)"
        tail = "\n    ".join(lines[-20:])
        raise InstallError(f"{reason} (log: {log})\nThe last lines:\n    {tail}")
