"""Which workers the flags of the command line ask for: here, over SSH, or of a scheduler's job."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from tf_redsync import environment
from tf_redsync.cli import clusters, hosts, isolation, output, surroundings
from tf_redsync.cli.starting import Remote


def arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of `run` that say which workers there are, from the command line.

    Raises:
        ValueError: for flags that do not go together, or hosts that are none.
    """
    _check(args)
    if args.hosts is not None or args.hostfile is not None:
        env = hosts.environment(args.env or ())
        if not env.get(environment.JOB):
            env[environment.JOB] = surroundings.job_secret()
        if args.start_timeout is not None:
            env[environment.START_TIMEOUT] = f"{args.start_timeout:g}"
        found = hosts.read(args.hostfile) if args.hosts is None else hosts.parse(args.hosts)
        at = Remote(found, args.ssh or hosts.SSH, args.python or sys.executable, args.port, env)
        return {"workers": None, "remote": at}
    if not (args.slurm or args.kubernetes):
        # The worker of a TF_CONFIG is there for other machines.
        env = isolation.isolate(args.isolate) if args.workers is not None else {}
        return {"workers": args.workers, "env": env}
    each = args.workers or 1
    if args.slurm:
        share = clusters.slurm(each, args.port)
    else:
        share = clusters.kubernetes(args.kubernetes, each, args.port)
    job = os.environ.get(environment.JOB)
    if not job and surroundings.rank_in(share.configs[0]) == 0:
        output.say(
            f"{environment.JOB} is not set: a process that reaches a worker's port and guesses the "
            f"job's name, {share.job}, can take part in its start. Set the variable to the same "
            "random text on all machines (docs/security.md)."
        )
    env = {environment.JOB: job or share.job}
    return {"workers": None, "configs": share.configs, "env": env}


def _check(args: argparse.Namespace) -> None:
    """Raises ValueError for flags about the workers that do not go together."""
    over_ssh = args.hosts is not None or args.hostfile is not None
    given = {
        "--hosts": args.hosts is not None,
        "--hostfile": args.hostfile is not None,
        "--slurm": args.slurm,
        "--kubernetes": args.kubernetes is not None,
    }
    chosen = [name for name, there in given.items() if there]
    if len(chosen) > 1:
        raise ValueError(f"one of {', '.join(given)} is enough. Received: {', '.join(chosen)}")
    if over_ssh and args.workers is not None:
        raise ValueError(
            f"-n is the number of workers here; with {chosen[0]} it stands behind each host, as in "
            f"a:2. Received: -n {args.workers}"
        )
    for name in ("ssh", "python", "env"):
        if getattr(args, name) and not over_ssh:
            raise ValueError(f"`--{name}` is for --hosts and --hostfile, which are missing")
    if args.workers is not None and args.workers < 1:
        raise ValueError(f"`workers` (-n) must be at least 1. Received: workers={args.workers}.")
    if args.kubernetes is not None and args.kubernetes < 1:
        raise ValueError(f"`--kubernetes` must be at least 1. Received: {args.kubernetes}")
    if args.port is not None and not (chosen and 0 < args.port < 65536):
        raise ValueError(
            "`--port` must be from 1 to 65535, and is for several machines. Received: "
            f"--port {args.port}"
        )
    if chosen and args.isolate == "yes":
        raise ValueError(
            f"`--isolate yes` cuts workers off from other machines. Received: {chosen[0]}"
        )
    if chosen and not over_ssh and args.min_workers is not None:
        raise ValueError(
            f"`--min-workers` needs one launcher for all workers. Received: {chosen[0]}"
        )
