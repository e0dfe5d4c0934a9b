"""The launcher's command line and arguments, and what is wrong with them."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from tf_redsync.cli import isolation
from tf_redsync.cli.restarts import Restarts

# By name: what `ArgumentParser.add_argument` takes.
_FLAGS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (
        ("-n", "--workers"),
        {"type": int, "help": "number of workers; without it, that of TF_CONFIG alone"},
    ),
    (
        ("--max-restarts",),
        {"type": int, "default": 0, "help": "starts of the job after a failure (0)"},
    ),
    (
        ("--min-workers",),
        {"type": int, "help": "with how many workers the job may go on (all)"},
    ),
    (("--timeout",), {"type": float, "help": "seconds until all workers are ended"}),
    (
        ("--start-timeout",),
        {"type": float, "help": "seconds that workers wait for each other at the start (600)"},
    ),
    (
        ("--grace",),
        {
            "type": float,
            "default": 10.0,
            "help": "seconds between the end of the job and SIGKILL (10)",
        },
    ),
    (
        ("--stop-grace",),
        {
            "type": float,
            "default": 120.0,
            "help": "seconds for a checkpoint after SIGTERM or SIGUSR1, before SIGKILL (120)",
        },
    ),
    (("--threads",), {"type": int, "help": "threads per worker (cores // n)"}),
    (("--log_dir",), {"help": "worker_<i>.log per worker; only worker 0 is printed"}),
    (
        ("--isolate",),
        {
            "choices": isolation.CHOICES,
            "default": "auto",
            "help": "keep others from the workers' ports. auto: other machines, where that is "
            "possible; yes: everyone, by a network namespace, in which the script has no network; "
            "no: nobody",
        },
    ),
    (("-m",), {"dest": "module", "nargs": argparse.REMAINDER, "help": "module to run"}),
    (("script",), {"nargs": argparse.REMAINDER, "help": "script.py and its arguments"}),
)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m tf_redsync.launch",
        usage="%(prog)s [-n WORKERS] [options] (script.py | -m module) [arguments of the script]",
        description="Starts a script on several worker processes of this machine under TF_CONFIG.",
        allow_abbrev=False,
    )
    for names, options in _FLAGS:
        made.add_argument(*names, **options)
    return made


def command(args: argparse.Namespace) -> list[str]:
    """The workers' command; raises ValueError if there is nothing to run."""
    if args.module:
        # Only the top package is looked up: finding a submodule would import its parents.
        if importlib.util.find_spec(args.module[0].partition(".")[0]) is None:
            raise ValueError(f"No module to run is named {args.module[0]!r} (-m).")
        return [sys.executable, "-m", *args.module]
    if not args.script:
        raise ValueError("No script. Give `script.py` or `-m module` after the launcher's options.")
    if not Path(args.script[0]).is_file():
        raise ValueError(f"The script does not exist. Received: {args.script[0]!r}.")
    return [sys.executable, *args.script]


def restarts(workers: int, max_restarts: int, min_workers: int | None) -> Restarts:
    """Returns what decides on restarts; raises ValueError for arguments that are out of range."""
    if max_restarts < 0:
        raise ValueError(
            f"`max_restarts` must be at least 0. Received: max_restarts={max_restarts}"
        )
    if min_workers is not None and not 1 <= min_workers <= workers:
        raise ValueError(
            f"`min_workers` must be from 1 to the number of workers, {workers}. Received: "
            f"min_workers={min_workers}"
        )
    return Restarts(max_restarts, min_workers or workers, list(range(workers)))


def check(
    workers: int | None,
    timeout: float | None,
    grace: float,
    threads: int | None,
    stop_grace: float,
    start_timeout: float | None,
) -> None:
    """Raises ValueError for an argument of `run` that is out of range or does not fit TF_CONFIG."""
    if workers is not None and workers < 1:
        raise ValueError(f"`workers` (-n) must be at least 1. Received: workers={workers}.")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"`timeout` must be positive seconds. Received: timeout={timeout}.")
    if not grace >= 0:
        raise ValueError(f"`grace` must be at least 0 seconds. Received: grace={grace}.")
    if not stop_grace >= 0:
        raise ValueError(
            f"`stop_grace` must be at least 0 seconds. Received: stop_grace={stop_grace}."
        )
    if start_timeout is not None and not start_timeout > 0:
        raise ValueError(
            f"`start_timeout` must be positive seconds. Received: start_timeout={start_timeout}."
        )
    if threads is not None and threads < 1:
        raise ValueError(f"`threads` must be at least 1. Received: threads={threads}.")
    given = os.environ.get("TF_CONFIG")
    if workers is not None and given:
        raise ValueError(
            "TF_CONFIG is already set, but the launcher writes its own: it starts all workers on "
            "this one machine. Either unset TF_CONFIG, or, for several machines, leave -n out: "
            "then the launcher starts the one worker of this TF_CONFIG. Received: "
            f"TF_CONFIG={given}"
        )
    if workers is None and not given:
        raise ValueError(
            "`workers` is missing: give -n/--workers for workers on this machine, or set TF_CONFIG "
            "to start the one worker that it names. Received: workers=None"
        )
