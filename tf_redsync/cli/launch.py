"""The launcher, `tf-redsync launch`: starts the workers of a job and restarts them after failures.

Every worker is a process with a `TF_CONFIG` that lists all workers. The launcher never imports
TensorFlow. A worker that waits in a collective for a dead peer ignores SIGTERM, so the launcher
sends SIGKILL to its process group after the grace period. Workers run on this machine, on others
over SSH, or on all machines of a scheduler's job, with a launcher on each (docs/launching.md). With
`--nodes` the launchers of several hosts form one job whose size may change (`node_agent.py`).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tf_redsync import environment
from tf_redsync.cli import gpus, isolation, options, output, worker_environment
from tf_redsync.cli.command_line import Command
from tf_redsync.cli.node_agent import NodeAgent, Nodes
from tf_redsync.cli.prewarm import Spares, can_run
from tf_redsync.cli.processes import Job, LaunchResult, TimeLimits, Worker, WorkerResult
from tf_redsync.cli.restarts import NotStarted, Restarts, run_attempts
from tf_redsync.cli.ssh import HostError, Remote, SSHStart
from tf_redsync.cli.worker_environment import (
    THREAD_VARIABLES,
    default_threads,
    free_ports,
    tf_config,
    variables,
)

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
    prewarm: bool = False,
    stream: Callable[[bytes], None] | None = None,
    isolate: str = "auto",
) -> LaunchResult:
    """Run `command` once per worker; return when all workers have ended.

    Args:
        command: The program and its arguments, equal for all workers.
        workers: Number of workers, at least 1. `None` starts the one worker that this process's
            TF_CONFIG names, and other launchers start the others.
        env: Variables added to this process's environment, for all workers.
        timeout: Seconds until SIGTERM; SIGKILL follows after `stop_grace`. `None`: no limit.
        grace: Seconds between the failure of a worker and SIGKILL for the others.
        threads: Intra-op and inter-op threads per worker. Default: the variables in
            `THREAD_VARIABLES` if they are set, else cores // workers.
        log_dir: Directory for `worker_<i>.log`; only worker 0 is then echoed.
        echo: Whether to print the workers' output, with the prefix `[worker i]`.
        addresses: "host:port" per worker; default: free ports of 127.0.0.1, new ones at a restart.
        wrappers: Words before the command, per worker, such as `ip netns exec NAME`.
        worker_env: Variables added after `env`, per worker. Default of CUDA_VISIBLE_DEVICES: an
            equal share of the GPUs of this machine.
        forward_signals: Whether to forward SIGINT, SIGTERM, SIGHUP and SIGUSR1 to the workers (main
            thread only). Otherwise an interrupt kills the workers at once with SIGKILL.
        max_restarts: Maximum number of restarts of the job after failures.
        min_workers: Minimum number of workers for a restart; default: all. See `Restarts`.
        start_timeout: Default of the strategy's `start_timeout`, in seconds.
        stop_grace: Seconds for a checkpoint after SIGTERM, SIGUSR1 or the timeout, then SIGKILL.
        cores_per_worker: Number of cores reserved for each worker, and of its threads unless
            `threads` is given. Default: workers share all cores.
        verbose: Whether to print TensorFlow's start-up messages; log files always have them.
        configs: TF_CONFIG of each worker on this machine, if other launchers start the other
            workers. Requires `workers=None`.
        remote: Other machines to run the workers on. Requires `workers=None`; `remote.python`
            replaces the first word of `command`.
        prewarm: Whether to import TensorFlow for a restart in advance, in a spare process for each
            worker on this machine. `command` must be a script or module of this interpreter.
        stream: Function that receives the output of worker 0 on this machine as it arrives, with
            incomplete lines.
        isolate: Protection of the workers' ports, if all workers run here with neither `addresses`
            nor `wrappers`. "auto" closes them to other machines, or prints a warning. "yes" moves
            this process and the workers into a network namespace. "no" leaves them open.

    Returns:
        A `LaunchResult`. A worker's failure does not raise.

    Raises:
        ValueError: an argument is out of range, or TF_CONFIG is set with `workers`, `configs` or
            `remote`, or missing without them; or `min_workers` or `prewarm` is given without
            `max_restarts`.
        HostError: a machine of `remote` cannot be used.
        OSError: `command` cannot be started, for example because it does not exist.
    """
    if isinstance(command, str) or not command:
        raise ValueError(
            "`command` must be a list of the program and its arguments, such as "
            f"[sys.executable, 'train.py']. Received: command={command!r}"
        )
    elsewhere = bool(configs or remote)
    options.check(workers, timeout, grace, threads, stop_grace, start_timeout, elsewhere)
    options.check_cores(cores_per_worker)
    if workers is None and not elsewhere:
        configs = [os.environ["TF_CONFIG"]]
    all_here = workers is not None and not addresses and not wrappers
    options.check_isolation(isolate, all_here)
    count = remote.workers if remote else len(configs) if configs else workers or 1
    options.check_per_worker(count, addresses=addresses, wrappers=wrappers, worker_env=worker_env)
    restarts = options.restarts(count, max_restarts, min_workers, prewarm)
    logs = _log_folder(log_dir)
    limits = TimeLimits(timeout, grace, stop_grace)
    signals: collections.deque[int] = collections.deque()
    to = output.Output(logs, echo, verbose, stream)
    start: Callable[[Job], None]
    prepare: Callable[[], None] | None = None
    spares = Spares()
    if remote is not None:
        start = SSHStart(command[1:], remote, threads, cores_per_worker, to, restarts)
    else:
        cores = threads or cores_per_worker
        base = variables(count, cores, start_timeout, env, workers is not None)
        if all_here:
            base |= isolation.isolate(isolate, base)
        start = LocalStart(
            command=command,
            configs=configs,
            base=base,
            addresses=addresses,
            wrappers=wrappers or [()] * count,
            worker_env=gpus.worker_variables(base, worker_env or [{}] * count),
            cores_per_worker=cores_per_worker,
            output=to,
            restarts=restarts,
            spares=spares,
        )
        if prewarm and not wrappers and can_run(command):
            prepare = start.prepare
    with spares, _forwarding(signals) if forward_signals else contextlib.nullcontext():
        return run_attempts(lambda: Job(limits, echo, signals, prepare), start, restarts)


@contextlib.contextmanager
def _forwarding(signals: collections.deque[int]) -> Iterator[None]:
    """Context manager that queues signals for the job, which forwards them to the workers.

    A SIGHUP that `nohup` ignores stays ignored. SIGCHLD must not be ignored, because the kernel
    would then reap the workers.
    """
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {n: signal.signal(n, lambda number, _: signals.append(number)) for n in numbers}
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_command(command: Sequence[str], args: argparse.Namespace) -> int:
    """Run a command with the parsed flags of `options.configure`; return the exit code."""
    try:
        return run(
            command,
            **options.worker_arguments(args),
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
            prewarm=args.prewarm,
            isolate=args.isolate,
        ).exit_code
    except HostError as error:
        output.say(str(error))
        return NO_HOST_EXIT_CODE
    except OSError as error:
        return _report_lack(error)


def _report_lack(error: Exception) -> int:
    """Report that a process cannot be started; return the exit code."""
    advice = "Check the limits of `ulimit -a`."
    cause = error.error if isinstance(error, NotStarted) else error
    if isinstance(cause, FileNotFoundError | PermissionError):
        advice = "Install this program, or name another by --ssh or --python."
    output.say(f"the workers cannot be started: {error}. {advice}")
    return 1


def _run_nodes(command: Sequence[str], nodes: Nodes, args: argparse.Namespace) -> int:
    """Run this host's workers of an elastic job; return the exit code."""
    options.check(
        None, args.timeout, args.grace, args.threads, args.stop_grace, args.start_timeout, True
    )
    options.check_cores(args.cores_per_worker)
    worker_environment.cores_of(0, nodes.workers, args.cores_per_worker)
    logs = _log_folder(args.log_dir)
    threads = args.threads or args.cores_per_worker
    signals: collections.deque[int] = collections.deque()
    spares = Spares()
    own = gpus.worker_variables(os.environ, [{}] * nodes.workers)

    def start(configs: Sequence[str], number: int) -> LocalStart:
        return LocalStart(
            command=command,
            configs=configs,
            base=variables(nodes.workers, threads, args.start_timeout, None, all_here=False),
            addresses=None,
            wrappers=[()] * nodes.workers,
            worker_env=own,
            cores_per_worker=args.cores_per_worker,
            output=output.Output(logs, True, args.verbose),
            restarts=Restarts(1, nodes.workers, list(range(nodes.workers)), number),
            spares=spares,
        )

    prepare = start([], 0).prepare if args.prewarm and can_run(command) else None
    limits = TimeLimits(args.timeout, args.grace, args.stop_grace)
    try:
        with spares, _forwarding(signals):
            return NodeAgent(nodes, limits, signals, start, prepare).run()
    except (NotStarted, OSError) as error:
        return _report_lack(error)


def _log_folder(log_dir: str | os.PathLike[str] | None) -> Path | None:
    """Create the directory of the log files; `None` without one.

    Raises:
        ValueError: the directory `log_dir` cannot be created.
    """
    if not log_dir:
        return None
    try:
        Path(log_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"`log_dir` cannot be created ({error}). Received: log_dir={os.fspath(log_dir)!r}"
        ) from error
    return Path(log_dir)


def _run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    try:
        nodes = options.nodes(args)
        if nodes is not None:
            return _run_nodes(options.command(args), nodes, args)
        return run_command(options.command(args), args)
    except ValueError as error:
        parser.error(str(error))


COMMAND = Command(
    "launch",
    "start the workers of a training on one or several machines",
    "Starts a script on several workers with TF_CONFIG: on this machine (-n), on other machines\n"
    "over SSH (--hosts), or as this machine's share of a SLURM or Kubernetes job. Flags of the\n"
    "launcher come before the script, and flags of the script after it.",
    (
        ("-n 2 train.py --epochs=3", "two workers on this machine"),
        ("-n 4 --max-restarts 3 --log-dir logs train.py", "restart after a failure; log files"),
        ("--hosts a:2,b:2 train.py", "two workers on each of two machines, over SSH"),
        ("-n 2 --cores-per-worker 8 -m package.train", "a module; eight cores for each worker"),
        ("--slurm train.py", "under srun --ntasks-per-node=1: one worker per node"),
        ("--kubernetes 2 train.py", "in each pod of an indexed Job with two completions"),
        ("--nodes 2:4 --rendezvous a:29500 train.py", "on each host: two to four, that may change"),
    ),
    options.configure,
    _run,
    usage="[flags] (script.py | -m module) [flags of the script]",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the job's exit code, or 2 for bad arguments."""
    return COMMAND.main(argv)


@dataclasses.dataclass(frozen=True)
class LocalStart:
    """Starts workers on this machine.

    Attributes:
        command: Command of every worker.
        configs: TF_CONFIG per worker; `None` for `addresses`.
        base: Environment of all workers.
        addresses: "host:port" per worker; `None` for free ports of 127.0.0.1.
        wrappers: Words before the command, per worker.
        worker_env: Variables added to `base`, per worker.
        cores_per_worker: Number of cores per worker; `None` for all.
        output: Destination of the workers' output.
        restarts: Attempt number and workers to start.
        spares: Processes that `prepare` has started for the next attempt.
    """

    command: Sequence[str]
    configs: Sequence[str] | None
    base: Mapping[str, str]
    addresses: Sequence[str] | None
    wrappers: Sequence[Sequence[str]]
    worker_env: Sequence[Mapping[str, str]]
    cores_per_worker: int | None
    output: output.Output
    restarts: Restarts
    spares: Spares

    def prepare(self) -> None:
        """Start a spare process for each worker, if there may be another attempt."""
        places = self.restarts.places
        if not self.restarts.left:
            return
        for i, place in enumerate(places):
            cores = worker_environment.cores_of(i, len(places), self.cores_per_worker)
            env = {**self.base, **self.worker_env[place]}
            self.spares.add(place, self.command[1:], env, cores)

    def __call__(self, job: Job) -> None:
        """Start the workers of an attempt, in spare processes if there are any.

        Raises:
            NotStarted: a worker cannot be started.
        """
        places = self.restarts.places
        attempt = {environment.RESTART: str(self.restarts.attempt)}
        for i, (place, config) in enumerate(zip(places, self._configs(places), strict=True)):
            number = worker_environment.rank_in(config) if self.configs else i
            env = {"TF_CONFIG": config, **attempt, **self.worker_env[place]}
            cores = worker_environment.cores_of(i, len(places), self.cores_per_worker)
            try:
                worker = Worker(
                    number,
                    [*self.wrappers[place], *self.command],
                    {**self.base, **env},
                    self.output.log(number),
                    self.output.printer(number),
                    self.restarts.attempt,
                    cores,
                    process=self.spares.take(place, env, cores),
                    stream=self.output.stream if number == 0 else None,
                )
            except OSError as error:
                raise NotStarted(place, error) from error
            job.add(worker)
        self.spares.close()

    def _configs(self, places: Sequence[int]) -> list[str]:
        if self.configs:
            return [self.configs[place] for place in places]
        if self.addresses:
            at = [self.addresses[place] for place in places]
        else:
            at = [f"127.0.0.1:{port}" for port in worker_environment.free_ports(len(places))]
        return [worker_environment.tf_config(at, i) for i in range(len(places))]
