"""Starts the workers of one job on this machine.

    python -m tf_redsync.launch -n 2 train.py --any --absl=flags
    python -m tf_redsync.launch -n 2 --timeout 600 --log_dir build/logs -m package.train --epochs=3
    python -m tf_redsync.launch -n 2 --isolate yes train.py

Every worker is a process of its own with a `TF_CONFIG` that lists all workers on free ports of the
loopback interface. The launcher never imports TensorFlow. A worker that waits in a collective for
a dead peer ignores SIGTERM, so whatever has not ended after the grace period gets SIGKILL, with its
whole process group. For several machines set `TF_CONFIG` yourself and start the script directly.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tf_redsync.cli import isolation
from tf_redsync.cli.processes import Job, LaunchResult, Worker, WorkerResult

__all__ = ["LaunchResult", "WorkerResult", "free_ports", "main", "run", "tf_config"]

THREAD_VARIABLES = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")


def free_ports(count: int) -> list[int]:
    """Returns `count` different free TCP ports.

    They lie below the range from which the kernel takes the ports of outgoing connections: a worker
    binds its port seconds after it was chosen, and no connection may take it in the meantime.
    """
    try:
        limits = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
        end = int(limits.split()[0])
    except (OSError, ValueError):
        end = 32768
    start = 15000 if end > 16000 else 1024
    ports: list[int] = []
    with contextlib.ExitStack() as bound:
        for _ in range(10000):
            if len(ports) == count:
                return ports
            port = random.SystemRandom().randrange(start, end)
            probe = bound.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                ports.append(port)
    raise RuntimeError(f"No {count} free TCP ports between {start} and {end} on 127.0.0.1.")


def tf_config(addresses: Sequence[str], index: int) -> str:
    """Returns the TF_CONFIG (JSON) of worker `index` among `addresses` ("host:port")."""
    cluster = {"worker": list(addresses)}
    return json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})


def default_threads(workers: int) -> int:
    """Returns the usable cores divided by the number of workers, at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, cores // workers)


def run(
    command: Sequence[str],
    workers: int,
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
) -> LaunchResult:
    """Runs `command` once per worker and returns when all have ended.

    Args:
      command: the program and its arguments, equal for all workers.
      workers: number of workers, at least 1.
      env: variables added to this process's environment, for all workers.
      timeout: seconds until SIGTERM, then `grace` seconds until SIGKILL; None for no limit.
      grace: seconds the others get after a worker has failed, before SIGKILL.
      threads: intra-op and inter-op threads per worker. Default: the variables
        TF_NUM_INTRAOP_THREADS and so on where they are set, else cores // workers.
      log_dir: directory for `worker_<i>.log`; only worker 0 is then echoed.
      echo: whether to print the workers' output, each line after its `[worker i]`.
      addresses: "host:port" per worker; default: free ports of 127.0.0.1.
      wrappers: per worker, words put before the command, e.g. `ip netns exec NAME`.
      worker_env: per worker, variables added after `env`.
      forward_signals: whether SIGINT, SIGTERM and SIGHUP are passed on to the workers (main thread
        only). Otherwise an interrupt ends the workers at once by SIGKILL.

    Returns:
      A `LaunchResult`. A failing worker is not an exception.

    Raises:
      ValueError: an argument is out of range, or the environment already holds a TF_CONFIG.
    """
    _validate(workers, timeout, grace, threads)
    addresses = addresses or [f"127.0.0.1:{port}" for port in free_ports(workers)]
    logs = Path(log_dir) if log_dir else None
    if logs:
        logs.mkdir(parents=True, exist_ok=True)
    base = _environment(workers, threads, env)
    job = Job(timeout, grace, echo)
    try:
        with _forwarding(job) if forward_signals else contextlib.nullcontext():
            for i in range(workers):
                extra = {"TF_CONFIG": tf_config(addresses, i), **(worker_env or [{}] * workers)[i]}
                argv = [*(wrappers[i] if wrappers else ()), *command]
                log = logs / f"worker_{i}.log" if logs else None
                job.add(Worker(i, argv, {**base, **extra}, log, _printer(i, echo, bool(logs))))
            return job.supervise()
    finally:
        job.close()


def _validate(workers: int, timeout: float | None, grace: float, threads: int | None) -> None:
    if workers < 1:
        raise ValueError(f"`workers` (-n) must be at least 1. Received: workers={workers}.")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"`timeout` must be positive seconds. Received: timeout={timeout}.")
    if not grace >= 0:
        raise ValueError(f"`grace` must be at least 0 seconds. Received: grace={grace}.")
    if threads is not None and threads < 1:
        raise ValueError(f"`threads` must be at least 1. Received: threads={threads}.")
    if os.environ.get("TF_CONFIG"):
        raise ValueError(
            "TF_CONFIG is already set, but the launcher writes its own: it starts all workers on "
            "this one machine. Either unset TF_CONFIG, or, for several machines, start the script "
            f"itself on each of them. Received: TF_CONFIG={os.environ['TF_CONFIG']}"
        )


def _environment(
    workers: int, threads: int | None, env: Mapping[str, str] | None
) -> dict[str, str]:
    """This process's environment, `env`, and thread counts the user has not set."""
    merged = {"PYTHONUNBUFFERED": "1", **os.environ, **(env or {})}
    for name in THREAD_VARIABLES:
        if threads is not None:
            merged[name] = str(threads)
        else:
            merged.setdefault(name, str(default_threads(workers)))
    return merged


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
def _forwarding(job: Job) -> Iterator[None]:
    """Hands SIGINT, SIGTERM and SIGHUP to the job while the block runs."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {n: signal.signal(n, lambda number, _: job.interrupt(number)) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tf_redsync.launch",
        usage="%(prog)s -n WORKERS [options] (script.py | -m module) [arguments of the script]",
        description="Starts a script on several worker processes of this machine under TF_CONFIG.",
        allow_abbrev=False,
    )
    parser.add_argument("-n", "--workers", type=int, required=True, help="number of workers")
    parser.add_argument("--timeout", type=float, help="seconds until all workers are ended")
    parser.add_argument(
        "--grace", type=float, default=10.0, help="seconds between the end of the job and SIGKILL"
    )
    parser.add_argument("--threads", type=int, help="threads per worker (default: cores // n)")
    parser.add_argument("--log_dir", help="worker_<i>.log per worker; only worker 0 is printed")
    parser.add_argument(
        "--isolate",
        choices=isolation.CHOICES,
        default="auto",
        help="keep others from the workers' ports. auto: other machines, where that is possible; "
        "yes: everyone, by a network namespace, in which the script has no network; no: nobody",
    )
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="module to run")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="script.py and its arguments")
    return parser


def _command(args: argparse.Namespace) -> list[str]:
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


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code of the job (2 for bad arguments)."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        command = _command(args)
        return run(
            command,
            args.workers,
            env=isolation.isolate(args.isolate),
            timeout=args.timeout,
            grace=args.grace,
            threads=args.threads,
            log_dir=args.log_dir,
            echo=True,
            forward_signals=True,
        ).exit_code
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
