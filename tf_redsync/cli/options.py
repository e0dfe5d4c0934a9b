"""The launcher's command line and arguments, and what is wrong with them."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
from pathlib import Path

from tf_redsync.cli import isolation
from tf_redsync.cli.command_line import Flag, Parser
from tf_redsync.cli.hosts import FORWARDED, SSH
from tf_redsync.cli.restarts import Restarts

_WHERE: tuple[Flag, ...] = (
    (
        ("-n", "--workers"),
        {"type": int, "help": "number of workers; with --slurm and --kubernetes, on each machine "
         "(1). Without any flag of this group: the worker that TF_CONFIG names"},
    ),
    (
        ("--hosts",),
        {"metavar": "HOST:N,...", "help": "workers on other machines, over SSH without a password"},
    ),
    (
        ("--hostfile",),
        {"metavar": "FILE", "help": "the same, one HOST:N or `HOST slots=N` a line"},
    ),
    (
        ("--slurm",),
        {"action": "store_true", "help": "this node's workers of a step of SLURM"},
    ),
    (
        ("--kubernetes",),
        {"type": int, "metavar": "PODS", "help": "this pod's workers of an indexed Job with so "
         "many completions"},
    ),
    (
        ("--port",),
        {"type": int, "help": "port of the first worker of each machine; others have the next ones "
         "(--hosts: a free one; --slurm: by the job's number; --kubernetes: 12345)"},
    ),
    (
        ("--ssh",),
        {"metavar": "COMMAND", "help": f"with --hosts: how to connect ({SSH})"},
    ),
    (
        ("--python",),
        {"metavar": "PATH", "help": "with --hosts: the interpreter there (the path of this one)"},
    ),
    (
        ("--env",),
        {"action": "append", "metavar": "NAME[=VALUE]", "help": "with --hosts: one more variable "
         "for the workers, beside those that begin with " + ", ".join(FORWARDED)},
    ),
)  # fmt: skip
_ENDS: tuple[Flag, ...] = (
    (
        ("--max-restarts",),
        {"type": int, "default": 0, "help": "starts of the job after a failure (0)"},
    ),
    (
        ("--min-workers",),
        {"type": int, "help": "with how many workers the job may go on (all)"},
    ),
    (
        ("--timeout",),
        {"type": float, "metavar": "SECONDS", "help": "until all workers are ended"},
    ),
    (
        ("--start-timeout",),
        {"type": float, "metavar": "SECONDS", "help": "for which workers wait for each other at "
         "the start (600)"},
    ),
    (
        ("--grace",),
        {"type": float, "default": 10.0, "metavar": "SECONDS", "help": "between the end of the job "
         "and SIGKILL (10)"},
    ),
    (
        ("--stop-grace",),
        {"type": float, "default": 120.0, "metavar": "SECONDS", "help": "for a checkpoint after "
         "SIGTERM or SIGUSR1, before SIGKILL (120)"},
    ),
)  # fmt: skip
_EACH: tuple[Flag, ...] = (
    (("--threads",), {"type": int, "help": "threads of a worker (cores over workers)"}),
    (
        ("--cores-per-worker",),
        {"type": int, "metavar": "N", "help": "give each worker N cores of its own, and N threads"},
    ),
    (
        ("--isolate",),
        {
            "choices": isolation.CHOICES,
            "default": "auto",
            "help": "with -n: keep others from the workers' ports. auto: other machines, where "
            "that is possible; yes: everyone, by a network namespace, in which the script has no "
            "network; no: nobody",
        },
    ),
)
_SHOWN: tuple[Flag, ...] = (
    (
        ("--log-dir",),
        {"metavar": "DIR", "help": "worker_<i>.log for each worker; only worker 0 is printed"},
    ),
    (
        ("--verbose",),
        {"action": "store_true", "help": "print TensorFlow's start-up lines too"},
    ),
)
_WHAT: tuple[Flag, ...] = (
    (("-m",), {"dest": "module", "nargs": argparse.REMAINDER, "help": "module to run"}),
    (("script",), {"nargs": argparse.REMAINDER, "help": "script.py and its arguments"}),
)


def configure(parser: Parser) -> None:
    """Adds the launcher's flags."""
    parser.flags(_WHAT)
    configure_workers(parser)


def configure_workers(parser: Parser) -> None:
    """Adds the flags that say which workers to start, and how."""
    parser.flags(_WHERE, "which workers")
    parser.flags(_ENDS, "when they end")
    parser.flags(_EACH, "what each gets")
    parser.flags(_SHOWN, "what is shown")


def command(args: argparse.Namespace) -> list[str]:
    """The workers' command; raises ValueError if there is nothing to run, or nothing says where."""
    _check_order(args)
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


def _check_order(args: argparse.Namespace) -> None:
    """Raises ValueError for flags behind the script that say which workers there are.

    They may be the script's own, so they count as the launcher's only where it has none.
    """
    chosen = [args.workers, args.hosts, args.hostfile, args.kubernetes, args.slurm or None]
    if os.environ.get("TF_CONFIG") or any(one is not None for one in chosen):
        return
    what, *behind = [*(args.module or ()), *(args.script or ())] or [""]
    for word in behind:
        if re.fullmatch(r"-n\d*|(--workers|--hosts|--hostfile|--slurm|--kubernetes)(=.*)?", word):
            raise ValueError(
                f"the launcher's options come before the script; what stands behind it is its own: "
                f"tf-redsync launch {word} ... {what}. Received: {word!r} behind {what!r}"
            )


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
    elsewhere: bool = False,
) -> None:
    """Raises ValueError for an argument of `run` that is out of range or does not fit TF_CONFIG.

    `elsewhere`: whether something else than `workers` says which workers there are.
    """
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
    if (workers is not None or elsewhere) and given:
        raise ValueError(
            "TF_CONFIG is already set, but the launcher writes its own. Either unset TF_CONFIG, or "
            "leave -n, --hosts, --slurm and --kubernetes out: then the launcher starts the one "
            "worker of this TF_CONFIG, and others start the others. Received: "
            f"TF_CONFIG={given}"
        )
    if workers is None and not given and not elsewhere:
        raise ValueError(
            "`workers` is missing: give -n/--workers for workers on this machine, or set TF_CONFIG "
            "to start the one worker that it names, or give --hosts for other machines. Received: "
            "workers=None"
        )


def check_cores(cores_per_worker: int | None) -> None:
    """Raises ValueError for a number of cores that is none."""
    if cores_per_worker is not None and cores_per_worker < 1:
        raise ValueError(
            f"`cores_per_worker` must be at least 1. Received: cores_per_worker={cores_per_worker}"
        )
