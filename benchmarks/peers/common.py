"""Shared by the workers of all peers: description, arguments, loop, result.

A worker runs in the virtual environment of its library, so this module imports only NumPy and the
standard library, and nothing of tf_redsync.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.models import COMPARED, DATA_BATCHES, WORKLOADS, batches, probe_logits

INTERFACE_VARIABLE = "TF_REDSYNC_BENCH_INTERFACE"  # set by the driver inside namespaces


@dataclasses.dataclass(frozen=True)
class Peer:
    """A library to compare with.

    Attributes:
      name: as in `--peers`; also the folder of its virtual environment.
      module: the worker program, for `python -m`.
      methods: its methods, `none` first.
      installs: the arguments of each `pip install`, in order.
      environment: variables for the installs.
      pythons: versions that the library can be installed for; empty: any.
      tools: commands that the installs need, with the packages that provide them.
    """

    name: str
    module: str
    methods: tuple[str, ...]
    installs: tuple[tuple[str, ...], ...]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    pythons: tuple[str, ...] = ()
    tools: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A worker's position, from TF_CONFIG.

    Attributes:
      rank: of this worker.
      size: number of workers.
      own_host: address of this worker.
      host: address of worker 0.
      port: an unused port of worker 0.
      interface: name of the network interface to use; "lo" outside namespaces.
    """

    rank: int
    size: int
    own_host: str
    host: str
    port: int
    interface: str


@dataclasses.dataclass(frozen=True)
class Session:
    """A model that is ready to train with one library and method.

    Attributes:
      tensor: converts an array to the library's tensor.
      step: one step on (inputs, labels) as tensors; returns when the update is done.
      barrier: returns when all workers have called it.
      logits: the model's output for inputs as an array, without training.
      params: number of trainable weights.
      versions: of the library and its dependencies.
      settings: notable or non-default options.
    """

    tensor: Callable[[np.ndarray], Any]
    step: Callable[[Any, Any], None]
    barrier: Callable[[], None]
    logits: Callable[[np.ndarray], np.ndarray]
    params: int
    versions: dict[str, str]
    settings: dict[str, Any]


def cluster(environment: Mapping[str, str] = os.environ) -> Cluster:
    """Returns this worker's position, from TF_CONFIG and the driver's variable."""
    config = json.loads(environment["TF_CONFIG"])
    workers, rank = config["cluster"]["worker"], config["task"]["index"]
    host, port = workers[0].rsplit(":", 1)
    own_host = workers[rank].rsplit(":", 1)[0]
    interface = environment.get(INTERFACE_VARIABLE) or "lo"
    return Cluster(rank, len(workers), own_host, host, int(port), interface)


def threads(environment: Mapping[str, str] = os.environ) -> int:
    """Returns the number of threads per op that the launcher sets for a worker."""
    return int(environment["TF_NUM_INTRAOP_THREADS"])


def sent_bytes(interface: str) -> int | None:
    """Returns the bytes that an interface has sent, as in `ip -s link`; None on loopback."""
    if interface == "lo":
        return None
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def timed(step: Callable[[Any, Any], None], data: list[Any], count: int) -> list[float]:
    """Returns the wall time (ms) of each of `count` steps."""
    times = []
    for i in range(count):
        start = time.perf_counter()
        step(*data[i % len(data)])
        times.append(1e3 * (time.perf_counter() - start))
    return times


def measured(session: Session, args: argparse.Namespace, where: Cluster) -> dict[str, Any]:
    """Trains and returns the measurements.

    The keys are those of `benchmarks/step/worker.py`, and `logits` of the same few examples on all
    workers after the last step: they are equal exactly if the workers' weights are.
    """
    workload = WORKLOADS[args.model]
    size = args.batch or workload.batch_size
    arrays = batches(workload, DATA_BATCHES, size, args.seed + 1 + where.rank)
    data = [tuple(map(session.tensor, pair)) for pair in arrays]
    session.barrier()
    warm_up = timed(session.step, data, args.warmup)
    session.barrier()
    before, processor = sent_bytes(where.interface), time.process_time()
    times = timed(session.step, data, args.steps)
    processor = time.process_time() - processor
    session.barrier()  # the others may not have received this worker's last bytes yet
    after = sent_bytes(where.interface)
    sent = None if before is None or after is None else (after - before) / args.steps
    return {
        "params": session.params,
        "batch": size,
        "times_ms": times,
        "warmup_ms": warm_up,
        "cpu_ms_per_step": 1e3 * processor / args.steps,
        "bytes_per_step": None,  # these libraries do not count them
        "wire_bytes_per_step": sent,
        "logits": probe_logits(args.model, session.logits, args.seed),
        "versions": session.versions,
        "settings": session.settings,
    }


def arguments(methods: Sequence[str], argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the arguments of a worker, which the driver sets."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--method", choices=methods, required=True)
    parser.add_argument("--model", choices=COMPARED, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", required=True, help="folder for worker_<i>.json")
    return parser.parse_args(argv)


def main(methods: Sequence[str], build: Callable[[argparse.Namespace, Cluster], Session]) -> None:
    """The program of a worker.

    Args:
      methods: choices of `--method`.
      build: creates the session from the arguments and the worker's position.
    """
    args, where = arguments(methods), cluster()
    result = measured(build(args, where), args, where)
    output = Path(args.output) / f"worker_{where.rank}.json"
    output.write_text(json.dumps(result), encoding="utf-8")
