"""Options of the launcher: flags, validation, and the workers that they select."""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tf_redsync import environment
from tf_redsync.cli import isolation, node_rendezvous, output, schedulers, ssh, worker_environment
from tf_redsync.cli.command_line import Flag, Parser
from tf_redsync.cli.membership import Settings
from tf_redsync.cli.node_agent import Nodes
from tf_redsync.cli.restarts import Restarts
from tf_redsync.cli.ssh import FORWARDED, SSH, Remote

_WHERE: tuple[Flag, ...] = (
    (
        ("-n", "--workers"),
        {"type": int, "help": "number of workers; with --slurm and --kubernetes, on each machine "
         "(1). Default without another flag of this group: the worker that TF_CONFIG names"},
    ),
    (
        ("--hosts",),
        {"metavar": "HOST[:N],...", "help": "N workers (1) on each host, over SSH without a "
         "password"},
    ),
    (
        ("--hostfile",),
        {"metavar": "FILE", "help": "hosts from a file, one HOST[:N] or `HOST slots=N` per line"},
    ),
    (
        ("--slurm",),
        {"action": "store_true", "help": "this node's workers of a SLURM step"},
    ),
    (
        ("--kubernetes",),
        {"type": int, "metavar": "PODS", "help": "this pod's workers of an indexed Job with "
         "PODS completions"},
    ),
    (
        ("--port",),
        {"type": int, "help": "port of the first worker of each machine; further workers have the "
         "next ports (--hosts: a free port; --slurm: by job and step; --kubernetes: 12345)"},
    ),
    (
        ("--ssh",),
        {"metavar": "COMMAND", "help": f"with --hosts: the SSH command ({SSH})"},
    ),
    (
        ("--python",),
        {"metavar": "PATH", "help": "with --hosts: the interpreter (the path of this one)"},
    ),
    (
        ("--env",),
        {"action": "append", "metavar": "NAME[=VALUE]", "help": "with --hosts: a further variable "
         "for the workers, beside those that begin with " + ", ".join(FORWARDED)},
    ),
)  # fmt: skip
_NODES: tuple[Flag, ...] = (
    (
        ("--nodes",),
        {"metavar": "MIN:MAX", "help": "number of hosts that train together; the launcher is "
         "started on each, and may come and go. N means N:N"},
    ),
    (
        ("--rendezvous",),
        {"metavar": "HOST:PORT", "help": "where the hosts meet: served by the launcher on HOST, or "
         "by `tf-redsync rendezvous`"},
    ),
    (
        ("--workers-per-node",),
        {"type": int, "metavar": "N", "help": "workers on this host (1)"},
    ),
    (
        ("--rendezvous-timeout",),
        {"type": float, "metavar": "SECONDS", "help": "how long to wait for enough hosts, and for "
         "a lost rendezvous (600)"},
    ),
    (
        ("--address",),
        {"metavar": "HOST", "help": "name or address at which the other hosts reach this one (that "
         "of its connection to the rendezvous)"},
    ),
)  # fmt: skip
_ENDS: tuple[Flag, ...] = (
    (
        ("--max-restarts",),
        {"type": int, "default": 0, "help": "maximum number of restarts after failures (0)"},
    ),
    (
        ("--min-workers",),
        {"type": int, "help": "minimum number of workers for a restart (all)"},
    ),
    (
        ("--prewarm",),
        {"action": "store_true", "help": "import TensorFlow for a restart in advance, in a waiting "
         "process for each worker on this machine; for scripts that set no variable before they "
         "import it (off)"},
    ),
    (
        ("--timeout",),
        {"type": float, "metavar": "SECONDS", "help": "from the start of the job to SIGTERM (no "
         "limit)"},
    ),
    (
        ("--start-timeout",),
        {"type": float, "metavar": "SECONDS", "help": "how long workers wait for each other at the "
         "start (600)"},
    ),
    (
        ("--grace",),
        {"type": float, "default": 10.0, "metavar": "SECONDS", "help": "between a failure and "
         "SIGKILL for the other workers (10)"},
    ),
    (
        ("--stop-grace",),
        {"type": float, "default": 120.0, "metavar": "SECONDS", "help": "for a checkpoint after "
         "SIGTERM, SIGUSR1 or the timeout, then SIGKILL (120)"},
    ),
)  # fmt: skip
_EACH: tuple[Flag, ...] = (
    (("--threads",), {"type": int, "help": "threads per worker (cores / workers)"}),
    (
        ("--cores-per-worker",),
        {"type": int, "metavar": "N", "help": "pin each worker to N cores of its own; N threads"},
    ),
    (
        ("--isolate",),
        {
            "choices": isolation.CHOICES,
            "default": "auto",
            "help": "with -n: protection of the workers' ports. auto: from other machines, if "
            "possible; yes: from other machines and users, by a network namespace in which the "
            "script has no network; no: none",
        },
    ),
)
_SHOWN: tuple[Flag, ...] = (
    (
        ("--log-dir",),
        {"metavar": "DIR", "help": "write worker_<i>.log files; only worker 0 is printed"},
    ),
    (
        ("--verbose",),
        {"action": "store_true", "help": "also print TensorFlow's start-up messages"},
    ),
)
_SELECTING = r"-n\d*|(--workers|--hosts|--hostfile|--slurm|--kubernetes|--nodes)(=.*)?"
_WHAT: tuple[Flag, ...] = (
    (("-m",), {"dest": "module", "nargs": argparse.REMAINDER, "help": "module to run"}),
    (("script",), {"nargs": argparse.REMAINDER, "help": "script.py and its arguments"}),
)


def configure(parser: Parser) -> None:
    """Add the launcher's flags."""
    parser.flags(_WHAT)
    parser.flags(_NODES, "hosts that may change")
    configure_workers(parser)


def configure_workers(parser: Parser) -> None:
    """Add the flags that select and configure the workers."""
    parser.flags(_WHERE, "workers")
    parser.flags(_ENDS, "restarts and time limits")
    parser.flags(_EACH, "resources")
    parser.flags(_SHOWN, "output")


def command(args: argparse.Namespace) -> list[str]:
    """Return the workers' command: the interpreter, and the script or module with its arguments.

    Raises:
        ValueError: the script or the module is missing, or flags follow the script.
    """
    _check_order(args)
    if args.module:
        # Only the top-level package is looked up: finding a submodule would import its parents.
        package = args.module[0].partition(".")[0]
        # `sys.path` of an installed program lacks the current directory, unlike with `python -m`.
        spec = importlib.machinery.PathFinder.find_spec(package, [os.getcwd()])
        if spec is None and importlib.util.find_spec(package) is None:
            raise ValueError(f"`-m` must be an importable module. Received: -m {args.module[0]}")
        return [sys.executable, "-m", *args.module]
    if args.script[:1] == ["--"]:
        del args.script[0]
    if not args.script:
        raise ValueError(
            "the script is missing. Give `script.py` or `-m module` after the launcher's options."
        )
    if not Path(args.script[0]).is_file():
        known = re.match(r"python[\d.]*$", os.path.basename(args.script[0]))
        hint = " Leave out the interpreter: the launcher starts its own." if known else ""
        raise ValueError(f"`script` must be an existing file.{hint} Received: {args.script[0]!r}")
    return [sys.executable, *args.script]


def _check_order(args: argparse.Namespace) -> None:
    """Raise ValueError if the flags that select workers come after the script.

    They may be the script's flags, so this is an error only if the launcher has none.
    """
    chosen = [args.workers, args.hosts, args.hostfile, args.kubernetes, args.slurm or None]
    chosen.append(getattr(args, "nodes", None))  # `bench` has no such flag
    if os.environ.get("TF_CONFIG") or any(value is not None for value in chosen):
        return
    program, *after = [*(args.module or ()), *(args.script or ())] or [""]
    for word in after:
        if re.fullmatch(_SELECTING, word):
            raise ValueError(
                f"the launcher's options must come before the script, and the script's own after "
                f"it: tf-redsync launch {word} ... {program}. Received: {word!r} after {program!r}"
            )


def restarts(workers: int, max_restarts: int, min_workers: int | None, prewarm: bool) -> Restarts:
    """Return the restart policy.

    Raises:
        ValueError: `max_restarts` is negative, `min_workers` is not in [1, `workers`], or an
            option needs restarts and there are none.
    """
    if max_restarts < 0:
        raise ValueError(
            f"`max_restarts` must be at least 0. Received: max_restarts={max_restarts}"
        )
    if min_workers is not None and not 1 <= min_workers <= workers:
        raise ValueError(
            f"`min_workers` must be from 1 to the number of workers, {workers}. Received: "
            f"min_workers={min_workers}"
        )
    if not max_restarts and (prewarm or min_workers is not None):
        raise ValueError(
            "`min_workers` and `prewarm` need `max_restarts`, since there is no restart without "
            f"it. Received: min_workers={min_workers}, prewarm={prewarm}, max_restarts=0"
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
    """Check the arguments of `run`, and that they do not conflict with TF_CONFIG.

    Args:
        workers: See `run`.
        timeout: See `run`.
        grace: See `run`.
        threads: See `run`.
        stop_grace: See `run`.
        start_timeout: See `run`.
        elsewhere: Whether `configs` or `remote` selects the workers instead of `workers`.

    Raises:
        ValueError: an argument is out of range or conflicts with TF_CONFIG; the message names it.
    """
    if workers is not None:
        worker_environment.check_count("workers", workers)
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
    if threads is not None:
        worker_environment.check_count("threads", threads)
    tf_config = os.environ.get("TF_CONFIG")
    if (workers is not None or elsewhere) and tf_config:
        raise ValueError(
            "TF_CONFIG is already set, but the launcher sets its own. Either unset TF_CONFIG, or "
            "omit -n, --hosts, --hostfile, --slurm, --kubernetes and --nodes to start the one "
            f"worker of this TF_CONFIG. Received: TF_CONFIG={tf_config}"
        )
    if workers is None and not tf_config and not elsewhere:
        raise ValueError(
            "`workers` is missing: pass -n/--workers for workers on this machine, or --hosts for "
            "other machines, or set TF_CONFIG to start the one worker that it names. Received: "
            "workers=None"
        )


def check_cores(cores_per_worker: int | None) -> None:
    """Raise ValueError for a number of cores that is not an integer >= 1."""
    if cores_per_worker is not None:
        worker_environment.check_count("cores_per_worker", cores_per_worker)


def check_isolation(isolate: str, all_here: bool) -> None:
    """Raise ValueError for an unknown choice, and for "yes" if workers may be elsewhere."""
    if isolate not in isolation.CHOICES:
        raise ValueError(
            f"`isolate` must be one of {isolation.CHOICES}. Received: isolate={isolate!r}"
        )
    if isolate == "yes" and not all_here:
        raise ValueError(
            "`isolate` (--isolate) is 'yes', which cuts the workers off from other machines. It "
            "needs `workers` (-n), and cannot be combined with --hosts, --slurm, --kubernetes, "
            "TF_CONFIG, `addresses` or `wrappers`. Received: isolate='yes'"
        )


def check_per_worker(workers: int, **lists: Sequence[Any] | None) -> None:
    """Raise ValueError for a list, given by its name, without one entry per worker."""
    for name, entries in lists.items():
        if entries and len(entries) != workers:
            raise ValueError(
                f"`{name}` must have one entry per worker, {workers}. Received {len(entries)}: "
                f"{name}={entries!r}"
            )


def worker_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `run` that select the workers, from the command line.

    Raises:
        ValueError: flags exclude each other, or hosts are malformed; the message names the flags.
    """
    _check(args)
    if args.hosts is not None or args.hostfile is not None:
        env = ssh.forwarded_environment(args.env or ())
        if not env.get(environment.JOB):
            env[environment.JOB] = worker_environment.job_secret()
        if args.start_timeout is not None:
            env[environment.START_TIMEOUT] = f"{args.start_timeout:g}"
        hosts = ssh.read(args.hostfile) if args.hosts is None else ssh.parse(args.hosts)
        command = args.ssh or ssh.default_command(env)
        at = Remote(hosts, command, args.python or sys.executable, args.port, env)
        return {"workers": None, "remote": at}
    if not (args.slurm or args.kubernetes):
        return {"workers": args.workers}
    each = args.workers or 1
    if args.slurm:
        share = schedulers.slurm(each, args.port)
    else:
        share = schedulers.kubernetes(args.kubernetes, each, args.port)
    job = os.environ.get(environment.JOB)
    if not job and worker_environment.rank_in(share.configs[0]) == 0:
        output.say(
            f"{environment.JOB} is not set: a process that can connect to a worker's port and "
            f"guesses the job's name, {share.job}, can join the job. Set the variable to the same "
            "random text on all machines (docs/security.md)."
        )
    env = {environment.JOB: job or share.job}
    return {"workers": None, "configs": share.configs, "env": env}


def _check(args: argparse.Namespace) -> None:
    """Raise ValueError for worker flags that exclude each other."""
    over_ssh = args.hosts is not None or args.hostfile is not None
    flags = {
        "--hosts": args.hosts is not None,
        "--hostfile": args.hostfile is not None,
        "--slurm": args.slurm,
        "--kubernetes": args.kubernetes is not None,
    }
    chosen = [name for name, is_set in flags.items() if is_set]
    if len(chosen) > 1:
        raise ValueError(
            f"only one of {', '.join(flags)} can be given. Received: {', '.join(chosen)}"
        )
    if over_ssh and args.workers is not None:
        raise ValueError(
            f"`-n` cannot be combined with {chosen[0]}: give the number of workers after each "
            f"host, as in a:2. Received: -n {args.workers}"
        )
    for name in ("ssh", "python", "env"):
        if getattr(args, name) and not over_ssh:
            raise ValueError(
                f"`--{name}` needs --hosts or --hostfile. Received: --{name}={getattr(args, name)}"
            )
    _check_values(args, chosen)
    if chosen and not over_ssh and args.min_workers is not None:
        raise ValueError(
            f"`--min-workers` cannot be combined with {chosen[0]}: it needs one launcher for all "
            f"workers. Received: --min-workers {args.min_workers}"
        )


def _check_values(args: argparse.Namespace, chosen: Sequence[str]) -> None:
    """Raise ValueError for worker flags that are out of range."""
    if args.workers is not None and args.workers < 1:
        raise ValueError(f"`workers` (-n) must be at least 1. Received: workers={args.workers}.")
    if args.kubernetes is not None and args.kubernetes < 1:
        raise ValueError(f"`--kubernetes` must be at least 1. Received: {args.kubernetes}")
    if args.port is not None and not (chosen and 0 < args.port < 65536):
        raise ValueError(
            "`--port` must be from 1 to 65535, and needs --hosts, --hostfile, --slurm or "
            f"--kubernetes. Received: --port {args.port}"
        )


def nodes(args: argparse.Namespace) -> Nodes | None:
    """Return this host's part of an elastic job; `None` without `--nodes`.

    Raises:
        ValueError: flags exclude each other or are out of range; the message names them.
    """
    if args.nodes is None:
        for name in ("rendezvous", "workers_per_node", "rendezvous_timeout", "address"):
            if (value := getattr(args, name)) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"`{flag}` needs --nodes. Received: {flag} {value}")
        return None
    _check_alone(args)
    if args.rendezvous is None:
        raise ValueError(
            "`--nodes` needs --rendezvous HOST:PORT, the same on all hosts. Received: --nodes "
            f"{args.nodes} and no --rendezvous"
        )
    match = re.fullmatch(r"\[?([^\[\]\s]+?)\]?:(\d{1,5})", args.rendezvous)
    if match is None or not 0 < int(match[2]) < 65536:
        raise ValueError(f"`--rendezvous` must be HOST:PORT. Received: {args.rendezvous!r}")
    if node_rendezvous.is_unspecified(match[1]):
        raise ValueError(
            "`--rendezvous` must name one host, by which all hosts reach it. Received: "
            f"{args.rendezvous!r}"
        )
    workers = 1 if args.workers_per_node is None else args.workers_per_node
    if workers < 1:
        raise ValueError(f"`--workers-per-node` must be at least 1. Received: {workers}")
    timeout = args.rendezvous_timeout
    if timeout is None:
        timeout = node_rendezvous.DEFAULT_TIMEOUT_SECONDS
    if not timeout > 0:
        raise ValueError(f"`--rendezvous-timeout` must be positive seconds. Received: {timeout:g}")
    if args.max_restarts < 0:
        raise ValueError(f"`max_restarts` must be at least 0. Received: {args.max_restarts}")
    settings = Settings(*_limits(args.nodes), args.max_restarts)
    secret = node_rendezvous.secret()
    return Nodes(settings, match[1], int(match[2]), workers, timeout, secret, args.address)


def _limits(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise ValueError(f"`--nodes` must be MIN:MAX with 1 <= MIN <= MAX. Received: {text!r}")
    return low, high


def _check_alone(args: argparse.Namespace) -> None:
    """Raise ValueError for flags that select workers in another way than `--nodes`."""
    others = {
        "-n": args.workers,
        "--hosts": args.hosts,
        "--hostfile": args.hostfile,
        "--slurm": args.slurm or None,
        "--kubernetes": args.kubernetes,
        "--port": args.port,
        "--ssh": args.ssh,
        "--python": args.python,
        "--env": args.env,
        "--min-workers": args.min_workers,
        "--isolate": args.isolate if args.isolate == "yes" else None,
    }
    instead = {"-n": ": use --workers-per-node", "--min-workers": ": use --nodes MIN:MAX"}
    for flag, value in others.items():
        if value is not None:
            raise ValueError(
                f"`{flag}` cannot be combined with --nodes{instead.get(flag, '')}. Received: "
                f"{flag} {value}"
            )
