"""The launcher's part on another machine: starts one worker, and ends it.

It is told by lines on its standard input: first what to run, as JSON, then signals. When the input
ends, because the launcher or the connection is gone, so does the worker, by SIGKILL. Its own lines
begin with `MARK`; everything else is the worker's output. Standard library only, and quick.
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

from tf_redsync.cli import surroundings
from tf_redsync.cli.worker_process import before_exec
from tf_redsync.version import __version__

MARK = b"\x1etf_redsync.remote "
_CANNOT = 2


def tell(**words: Any) -> None:
    """Tells the launcher something."""
    sys.stdout.buffer.write(MARK + json.dumps(words).encode() + b"\n")
    sys.stdout.buffer.flush()


def _problem(job: dict[str, Any]) -> str:
    """Why the worker cannot be started here; empty if it can."""
    if not Path(job["cwd"]).is_dir():
        return (
            f"there is no directory {job['cwd']} on this machine. Start the launcher in one that "
            "all machines have"
        )
    script = Path(job["cwd"]) / job["argv"][0]
    if job["argv"][0] != "-m" and not script.is_file():
        return f"there is no {script} on this machine. All machines need the script, at this path"
    return ""


def _listen(process: subprocess.Popen[bytes]) -> None:
    """Sends the signals that are asked for, and SIGKILL at the end of the input."""
    while line := sys.stdin.buffer.readline():
        with contextlib.suppress(ProcessLookupError, ValueError):
            os.killpg(process.pid, int(line))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _environment(job: dict[str, Any]) -> dict[str, str]:
    os.environ.update(job["env"])
    return {
        **surroundings.for_workers(job["workers"], job["threads"], None, None, all_here=False),
        **job["own"],
    }


def main() -> int:
    """Runs one worker; returns 0 if it was started, however it ended."""
    tell(version=__version__)
    line = sys.stdin.buffer.readline()
    if not line.startswith(b"{"):  # a signal before there is a worker, or the end
        return _CANNOT
    job = json.loads(line)
    problem = _problem(job)
    try:
        cores = surroundings.cores_of(job["slot"], job["workers"], job["cores"])
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
    with contextlib.suppress(ProcessLookupError):  # whatever the worker has left behind
        os.killpg(process.pid, signal.SIGKILL)
    tell(ended=process.wait())
    return 0


if __name__ == "__main__":
    for _number in (
        signal.SIGINT,
        signal.SIGHUP,
    ):  # not SIG_IGN, which is inherited
        signal.signal(_number, lambda *_: None)
    _code = main()
    sys.stdout.flush()
    os._exit(_code)  # not held up by the thread that waits for a line
