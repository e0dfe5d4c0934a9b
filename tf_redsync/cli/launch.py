"""Starts the workers of one job on this machine, again if they fail.

    python -m tf_redsync.launch -n 2 train.py --any --absl=flags
    python -m tf_redsync.launch -n 2 --max-restarts 3 --log_dir logs -m package.train --epochs=3
    python -m tf_redsync.launch -n 2 --isolate yes train.py

Every worker is a process of its own with a `TF_CONFIG` that lists all workers on free ports of the
loopback interface. The launcher never imports TensorFlow. A worker that waits in a collective for
a dead peer ignores SIGTERM, so whatever has not ended after the grace period gets SIGKILL, with its
whole process group. On several machines each one's launcher starts the worker that its TF_CONFIG
names: leave -n out (docs/launching.md).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tf_redsync import environment
from tf_redsync.cli import isolation, options
from tf_redsync.cli.processes import Ends, Job, LaunchResult, Worker, WorkerResult
from tf_redsync.cli.restarts import NotStarted, Restarts, run_attempts
from tf_redsync.cli.surroundings import (
    THREAD_VARIABLES,
    default_threads,
    for_workers,
    free_ports,
    rank_in,
    tf_config,
)

__all__ = [
    "THREAD_VARIABLES",
    "LaunchResult",
    "WorkerResult",
    "default_threads",
    "free_ports",
    "main",
    "run",
    "tf_config",
]


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

    Returns:
      A `LaunchResult`. A failing worker is not an exception.

    Raises:
      ValueError: an argument is out of range, the environment already holds a TF_CONFIG, or it
        holds none and `workers` is `None`.
    """
    options.check(workers, timeout, grace, threads, stop_grace, start_timeout)
    count = workers or 1
    restarts = options.restarts(count, max_restarts, min_workers)
    logs = Path(log_dir) if log_dir else None
    if logs:
        logs.mkdir(parents=True, exist_ok=True)
    ends = Ends(timeout, grace, stop_grace)
    signals: collections.deque[int] = collections.deque()
    start = _Starter(
        command=command,
        alone=workers is None,
        base=for_workers(workers, threads, start_timeout, env),
        addresses=addresses,
        wrappers=wrappers or [()] * count,
        worker_env=worker_env or [{}] * count,
        logs=logs,
        echo=echo,
        restarts=restarts,
    )
    with _forwarding(signals) if forward_signals else contextlib.nullcontext():
        return run_attempts(lambda: Job(ends, echo, signals), start, restarts)


@dataclasses.dataclass(frozen=True)
class _Starter:
    """Starts the workers of an attempt. `alone`: the one that TF_CONFIG names, and no other."""

    command: Sequence[str]
    alone: bool
    base: Mapping[str, str]
    addresses: Sequence[str] | None
    wrappers: Sequence[Sequence[str]]
    worker_env: Sequence[Mapping[str, str]]
    logs: Path | None
    echo: bool
    restarts: Restarts

    def __call__(self, job: Job) -> None:
        places = self.restarts.places
        if self.alone:
            at: Sequence[str] = ()
        elif self.addresses:
            at = [self.addresses[place] for place in places]
        else:
            at = [f"127.0.0.1:{port}" for port in free_ports(len(places))]
        for i, place in enumerate(places):
            number = rank_in(os.environ["TF_CONFIG"]) if self.alone else i
            config = {} if self.alone else {"TF_CONFIG": tf_config(at, i)}
            attempt = {environment.RESTART: str(self.restarts.attempt)}
            env = {**self.base, **config, **attempt, **self.worker_env[place]}
            log = self.logs / f"worker_{number}.log" if self.logs else None
            printer = _printer(number, self.echo, bool(self.logs))
            argv = [*self.wrappers[place], *self.command]
            try:
                worker = Worker(number, argv, env, log, printer, self.restarts.attempt > 0)
            except OSError as error:
                raise NotStarted(place, error) from error
            job.add(worker)


def _printer(index: int, echo: bool, has_log: bool) -> Callable[[bytes], None] | None:
    """Where a worker's complete lines go: prefixed, or plain for worker 0 beside log files."""
    if not echo or (has_log and index > 0):
        return None
    prefix = b"" if has_log else b"[worker %d] " % index

    def write(lines: bytes) -> None:
        text = b"".join(prefix + line for line in lines.splitlines(keepends=True))
        # A text-only replacement of sys.stdout (a notebook, a test) has no byte buffer.
        if hasattr(sys.stdout, "buffer"):
            sys.stdout.buffer.write(text)
        else:
            sys.stdout.write(text.decode("utf-8", "replace"))
        sys.stdout.flush()

    return write


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


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code of the job (2 for bad arguments)."""
    parser = options.parser()
    args = parser.parse_args(argv)
    try:
        command = options.command(args)
        return run(
            command,
            args.workers,
            # The worker of a TF_CONFIG is there for other machines.
            env=isolation.isolate(args.isolate) if args.workers is not None else None,
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
        ).exit_code
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
