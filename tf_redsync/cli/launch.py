"""Starts the workers of one job, again if they fail; `tf-redsync launch`.

Every worker is a process of its own with a `TF_CONFIG` that lists all workers. The launcher never
imports TensorFlow. A worker that waits in a collective for a dead peer ignores SIGTERM, so whatever
has not ended after the grace period gets SIGKILL, with its whole process group. Workers are on this
machine, on others over SSH, or where each machine has a launcher, on those (docs/launching.md).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tf_redsync.cli import options, output, where
from tf_redsync.cli.command_line import Command
from tf_redsync.cli.processes import Ends, Job, LaunchResult
from tf_redsync.cli.remote_worker import HostError
from tf_redsync.cli.restarts import run_attempts
from tf_redsync.cli.starting import Here, Output, OverSSH, Remote
from tf_redsync.cli.surroundings import (
    THREAD_VARIABLES,
    default_threads,
    for_workers,
    free_ports,
    tf_config,
)
from tf_redsync.cli.worker_process import WorkerResult

__all__ = [
    "COMMAND",
    "NO_HOST_EXIT_CODE",
    "THREAD_VARIABLES",
    "LaunchResult",
    "Remote",
    "WorkerResult",
    "default_threads",
    "free_ports",
    "main",
    "run",
    "tf_config",
]

NO_HOST_EXIT_CODE = 69  # EX_UNAVAILABLE of sysexits.h


def run(
    command: Sequence[str],
    workers: int | None,
    *,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    grace: float = 10.0,
    threads: int | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    echo: bool = False,
    addresses: Sequence[str] | None = None,
    wrappers: Sequence[Sequence[str]] | None = None,
    worker_env: Sequence[Mapping[str, str]] | None = None,
    forward_signals: bool = False,
    max_restarts: int = 0,
    min_workers: int | None = None,
    start_timeout: float | None = None,
    stop_grace: float = 120.0,
    cores_per_worker: int | None = None,
    verbose: bool = True,
    configs: Sequence[str] | None = None,
    remote: Remote | None = None,
) -> LaunchResult:
    """Runs `command` once per worker and returns when all have ended.

    Args:
      command: the program and its arguments, equal for all workers.
      workers: number of workers, at least 1. `None`: the one that this process's TF_CONFIG names;
        the others are started elsewhere.
      env: variables added to this process's environment, for all workers.
      timeout: seconds until SIGTERM, then `grace` seconds until SIGKILL; None for no limit.
      grace: seconds the others get after a worker has failed, before SIGKILL.
      threads: intra-op and inter-op threads per worker. Default: the variables
        TF_NUM_INTRAOP_THREADS and so on where they are set, else cores // workers.
      log_dir: directory for `worker_<i>.log`; only worker 0 is then echoed.
      echo: whether to print the workers' output, each line after its `[worker i]`.
      addresses: "host:port" per worker; default: free ports of 127.0.0.1, new ones at a restart.
      wrappers: per worker, words put before the command, e.g. `ip netns exec NAME`.
      worker_env: per worker, variables added after `env`.
      forward_signals: whether SIGINT, SIGTERM, SIGHUP and SIGUSR1 are passed on to the workers
        (main thread only). Otherwise an interrupt ends the workers at once by SIGKILL.
      max_restarts: how often the job is started again after a worker has failed.
      min_workers: with how many workers it may be started again; default: all. See `Restarts`.
      start_timeout: the strategy's, where the program does not give it one.
      stop_grace: seconds after SIGTERM and SIGUSR1, in which workers make a checkpoint, before
        SIGKILL.
      cores_per_worker: how many cores each worker may use, none of them with another one; also its
        number of threads, without `threads`. Default: all, for each.
      verbose: whether TensorFlow's start-up lines are printed, too; log files have them always.
      configs: TF_CONFIG of each worker here, where other launchers start the others; then `workers`
        is `None`.
      remote: other machines that the workers are started on; then `workers` is `None`, and the
        first word of `command` is `remote.python` there.

    Returns:
      A `LaunchResult`. A failing worker is not an exception.

    Raises:
      ValueError: an argument is out of range, the environment already holds a TF_CONFIG, or it
        holds none and `workers` is `None`.
      HostError: a machine of `remote` cannot be used.
    """
    elsewhere = bool(configs or remote)
    options.check(workers, timeout, grace, threads, stop_grace, start_timeout, elsewhere)
    options.check_cores(cores_per_worker)
    if workers is None and not elsewhere:
        configs = [os.environ["TF_CONFIG"]]
    count = remote.workers if remote else len(configs) if configs else workers or 1
    restarts = options.restarts(count, max_restarts, min_workers)
    logs = Path(log_dir) if log_dir else None
    if logs:
        logs.mkdir(parents=True, exist_ok=True)
    ends = Ends(timeout, grace, stop_grace)
    signals: collections.deque[int] = collections.deque()
    to = Output(logs, echo, verbose)
    start: Callable[[Job], None]
    if remote is not None:
        start = OverSSH(command[1:], remote, threads, cores_per_worker, to, restarts)
    else:
        start = Here(
            command=command,
            configs=configs,
            base=for_workers(
                count, threads or cores_per_worker, start_timeout, env, workers is not None
            ),
            addresses=addresses,
            wrappers=wrappers or [()] * count,
            worker_env=worker_env or [{}] * count,
            cores_per_worker=cores_per_worker,
            output=to,
            restarts=restarts,
        )
    with _forwarding(signals) if forward_signals else contextlib.nullcontext():
        return run_attempts(lambda: Job(ends, echo, signals), start, restarts)


@contextlib.contextmanager
def _forwarding(signals: collections.deque[int]) -> Iterator[None]:
    """Notes signals for the job, which passes them on, while the block runs."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {n: signal.signal(n, lambda number, _: signals.append(number)) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_command(command: Sequence[str], args: argparse.Namespace) -> int:
    """Runs a command as the flags of `options.configure` say; returns the exit code."""
    try:
        return run(
            command,
            **where.arguments(args),
            timeout=args.timeout,
            grace=args.grace,
            threads=args.threads,
            log_dir=args.log_dir,
            echo=True,
            forward_signals=True,
            max_restarts=args.max_restarts,
            min_workers=args.min_workers,
            start_timeout=args.start_timeout,
            stop_grace=args.stop_grace,
            cores_per_worker=args.cores_per_worker,
            verbose=args.verbose,
        ).exit_code
    except HostError as error:
        output.say(str(error))
        return NO_HOST_EXIT_CODE


def _run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    try:
        return run_command(options.command(args), args)
    except ValueError as error:
        parser.error(str(error))


COMMAND = Command(
    "launch",
    "start the workers of a training, here or on several machines",
    "Starts a script on several workers under TF_CONFIG: processes of this machine (-n), of\n"
    "others over SSH (--hosts), or this machine's part of a job of SLURM or Kubernetes. Flags of\n"
    "the launcher stand before the script, and the script's own behind it.",
    (
        ("-n 2 train.py --epochs=3", "two workers on this machine"),
        ("-n 4 --max-restarts 3 --log-dir logs train.py", "again after a failure; log files"),
        ("--hosts a:2,b:2 train.py", "two workers on each of two machines, over SSH"),
        ("-n 2 --cores-per-worker 8 -m package.train", "a module; cores of their own"),
        ("--slurm train.py", "below srun --ntasks-per-node=1: one worker a node"),
        ("--kubernetes 2 train.py", "in each pod of an indexed Job with two completions"),
    ),
    options.configure,
    _run,
    usage="[flags] (script.py | -m module) [flags of the script]",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code of the job (2 for bad arguments)."""
    return COMMAND.main(argv)


if __name__ == "__main__":
    sys.exit(main())
