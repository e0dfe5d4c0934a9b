"""The launcher's agent on another machine: starts one worker and forwards signals to it.

The agent reads lines from its standard input: first the job, as JSON, then signal numbers. The
input ends when the launcher or the connection is lost; the agent then kills the worker with
SIGKILL. The agent's own lines begin with `MARK`; all other output is the worker's. The agent must
start quickly, so it imports only the standard library and modules that do the same.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tf_redsync.cli import gpus, worker_environment
from tf_redsync.cli.processes import before_exec
from tf_redsync.version import __version__

MARK = b"\x1etf_redsync.remote "
_CANNOT = 2


def tell(**words: Any) -> None:
    """Send a message to the launcher."""
    sys.stdout.buffer.write(MARK + json.dumps(words).encode() + b"\n")
    sys.stdout.buffer.flush()


def _problem(job: dict[str, Any]) -> str:
    """Return the reason why the worker cannot be started; empty if it can."""
    if not Path(job["cwd"]).is_dir():
        return (
            f"the working directory {job['cwd']} does not exist on this machine. Start the "
            "launcher in a directory that all machines have"
        )
    script = Path(job["cwd"]) / job["argv"][0]
    if job["argv"][0] != "-m" and not script.is_file():
        return f"the script {script} does not exist on this machine. Copy it to the same path"
    return ""


def _listen(process: subprocess.Popen[bytes]) -> None:
    """Forward signals to the worker, and send SIGKILL at the end of the input."""
    while line := sys.stdin.buffer.readline():
        with contextlib.suppress(ProcessLookupError, ValueError):
            os.killpg(process.pid, int(line))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _environment(job: dict[str, Any]) -> dict[str, str]:
    os.environ.update(job["env"])
    base = worker_environment.variables(job["workers"], job["threads"], None, None, all_here=False)
    place, places = job["gpus"]  # with dropped workers, so that a restart moves no worker
    describe = place == 0  # one agent reports for the machine
    own = gpus.worker_variables(base, [{}] * places, describe)[place]
    return {**base, **own, **job["own"]}


def main() -> int:
    """Run one worker; return 0 if it was started, whatever its exit code."""
    tell(version=__version__)
    line = sys.stdin.buffer.readline()
    if not line.startswith(b"{"):  # a signal before the job, or the end of the input
        return _CANNOT
    job = json.loads(line)
    problem = _problem(job)
    try:
        cores = worker_environment.cores_of(job["slot"], job["workers"], job["cores"])
    except ValueError as error:
        problem, cores = str(error), None
    if problem:
        print(f"tf_redsync.launch: {problem}.", flush=True)
        return _CANNOT
    process = subprocess.Popen(
        [sys.executable, *job["argv"]],
        cwd=job["cwd"],
        env=_environment(job),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=functools.partial(before_exec, os.getpid(), cores),
    )
    threading.Thread(target=_listen, args=(process,), daemon=True).start()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with contextlib.suppress(ProcessLookupError):  # the worker's remaining child processes
        os.killpg(process.pid, signal.SIGKILL)
    tell(ended=process.wait())
    return 0


if __name__ == "__main__":
    for _number in (
        signal.SIGINT,
        signal.SIGHUP,
    ):  # a handler, because child processes inherit SIG_IGN
        signal.signal(_number, lambda *_: None)
    _code = main()
    sys.stdout.flush()
    os._exit(_code)  # does not wait for the thread that reads the input
