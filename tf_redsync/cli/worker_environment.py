"""Environment of a worker: ports, TF_CONFIG, cores, threads and variables."""

from __future__ import annotations

import contextlib
import json
import math
import numbers
import os
import random
import secrets
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from tf_redsync import environment
from tf_redsync.cluster import ports

# Each step allocates tensors of the size of the model, in memory that glibc returns to the system.
# Huge pages cause 512 times fewer page faults.
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
THREAD_VARIABLES = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")
_CGROUP = Path("/sys/fs/cgroup")
# Of version 2 and version 1, in microseconds.
_QUOTA_FILES = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))


def free_ports(count: int) -> list[int]:
    """Return `count` different free TCP ports.

    A worker binds its port seconds after this call. The ports lie below the kernel's range for
    outgoing connections, so that no connection takes one in the meantime, unless that range begins
    below 2048. No worker of another job has reserved them.
    """
    try:
        limits = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
        end = int(limits.split()[0])
    except (OSError, ValueError):
        end = 0
    if end < 2048:  # unknown, or no room below it
        end = 32768
    start = 15000 if end > 16000 else 1024
    free: list[int] = []
    with contextlib.ExitStack() as bound:
        for _ in range(10000):
            if len(free) == count:
                return free
            port = random.SystemRandom().randrange(start, end)
            with contextlib.ExitStack() as attempt:
                probe = attempt.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
                with contextlib.suppress(OSError):
                    probe.bind(("127.0.0.1", port))
                    attempt.enter_context(ports.reserve(port))
                    bound.push(attempt.pop_all())
                    free.append(port)
    raise RuntimeError(f"cannot find {count} free TCP ports from {start} to {end} on 127.0.0.1.")


def check_count(name: str, value: object) -> None:
    """Check that an argument is an integer >= 1, without NumPy, which `checks` imports.

    Raises:
        ValueError: it is not; the message has `name`.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(f"`{name}` must be an integer >= 1. Received: {name}={value!r}")


def tf_config(addresses: Sequence[str], index: int) -> str:
    """Return the TF_CONFIG (JSON) of worker `index` among `addresses` ("host:port").

    Raises:
        ValueError: there is no such worker.
    """
    if type(index) is not int or index not in range(len(addresses)):
        raise ValueError(
            f"`index` must be an integer >= 0 and below the number of addresses, {len(addresses)}. "
            f"Received: index={index!r}"
        )
    cluster = {"worker": list(addresses)}
    return json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})


def default_threads(workers: int) -> int:
    """Return the number of usable cores divided by the number of workers, at least 1.

    Raises:
        ValueError: `workers` is not an integer >= 1.
    """
    check_count("workers", workers)
    return max(1, _usable_cores() // workers)


def _usable_cores() -> int:
    """Return the number of this process's cores, at most the CPU quota of its container."""
    cores = len(os.sched_getaffinity(0))
    for names in _QUOTA_FILES:
        with contextlib.suppress(OSError, ValueError):  # the quota of version 2 may be "max"
            quota, period = " ".join((_CGROUP / name).read_text() for name in names).split()
            if int(quota) > 0:
                return min(cores, math.ceil(int(quota) / int(period)))
    return cores


def cores_of(slot: int, workers: int, count: int | None) -> list[int] | None:
    """Return the adjacent cores of a worker; `None` for all cores of this process.

    Args:
        slot: Index of the worker on this machine, from 0.
        workers: Number of workers on this machine.
        count: Cores per worker.

    Raises:
        ValueError: this machine has too few cores.
    """
    if count is None:
        return None
    usable = sorted(os.sched_getaffinity(0))
    if workers * count > len(usable):
        raise ValueError(
            f"`cores_per_worker` times {workers} workers must be at most the number of usable "
            f"cores of {socket.gethostname()}, {len(usable)}. Received: cores_per_worker={count}"
        )
    return usable[slot * count : (slot + 1) * count]


def job_secret() -> str:
    """Return the job's secret: from this process's environment, else random."""
    return os.environ.get(environment.JOB) or secrets.token_hex(16)


def rank_in(text: str) -> int:
    """Return the worker's rank in a TF_CONFIG; 0 for a malformed one.

    Tasks that do not train, such as evaluators, are numbered after the workers.
    """
    try:
        config = json.loads(text)
        kinds = list(dict.fromkeys(["chief", "worker", *sorted(config["cluster"])]))
        task = config["task"]
        if task["type"] not in kinds:  # an evaluator need not be in the cluster
            kinds.append(task["type"])
        before = kinds[: kinds.index(task["type"])]
        return int(task["index"]) + sum(len(config["cluster"].get(kind, ())) for kind in before)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        # The worker reports the error.
        return 0


def variables(
    workers: int,
    threads: int | None,
    start_timeout: float | None,
    env: Mapping[str, str] | None,
    all_here: bool = True,
) -> dict[str, str]:
    """Return the workers' environment: this process's, `env`, and defaults.

    Args:
        workers: Number of workers on this machine.
        threads: Threads per worker; `None` for the default.
        start_timeout: Default of the strategy's `start_timeout`, in seconds; `None` for none.
        env: Variables added to this process's environment.
        all_here: Whether this launcher starts all workers of the job.
    """
    merged = {"PYTHONUNBUFFERED": "1", **_HUGE_PAGES, **os.environ, **(env or {})}
    for name in THREAD_VARIABLES:
        if threads is not None:
            merged[name] = str(threads)
        else:
            merged.setdefault(name, str(default_threads(workers)))
    # Workers of other launchers need the same secret, so a random one does not serve them.
    if all_here and not merged.get(environment.JOB):
        merged[environment.JOB] = job_secret()
    if start_timeout is not None:
        merged[environment.START_TIMEOUT] = f"{start_timeout:g}"
    return merged
