"""Runs the clusters of `benchmarks/scale/scale.py` and collects their results in one report."""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any

from benchmarks import netlab
from benchmarks.models import WORKLOADS
from benchmarks.scale import scale_methods
from benchmarks.scale.traffic import buckets_of
from benchmarks.workers import MeasurementError, measure, threads
from tf_redsync import launch

NETWORK = "TF_REDSYNC_BENCH_NETWORK"  # the process that created the network with an adjustable rate
FAST = "20gbit"  # faster than TensorFlow's collectives over gRPC
CALIBRATED = 2  # number of workers
# Memory of a worker, measured for `mlp`: TensorFlow, and copies of the weights at the peak.
WORKER_BYTES, COPIES = 0.7e9, 10


def report(args: argparse.Namespace) -> dict[str, Any]:
    """Runs all requested measurements; returns the report, without predictions.

    Args:
        args: The command line of `benchmarks/scale/scale.py`.
    """
    specs = _specs(args.model)
    elements = sum(spec.size for spec in specs)
    counts = sorted({CALIBRATED, *args.check})
    check_memory(counts[-1], elements)
    measured = [_cluster(workers, args) for workers in counts]
    found = measured[0].pop("calibration")
    decode = found.pop("decode_s")
    print("dry runs ...", flush=True)
    methods = {
        name: {
            "processor_s": {
                "unlimited": row["unlimited"]["processor_s"],
                "limited": row["processor_s"],
            },
            "decode_s": decode.get(name, 0.0),
            "buckets": [
                dataclasses.asdict(bucket)
                for bucket in buckets_of(scale_methods.make(name, args.density), specs)
            ],
        }
        for name, row in measured[0]["methods"].items()
    }
    return {
        "model": args.model,
        "params": elements,
        "batch": measured[0]["batch"],
        "density": args.density,
        "rate": args.rate,
        "cores": launch.default_threads(1),
        "calibration": {**found, "methods": methods},
        "measured": [row for row in measured if row["workers"] in args.check],
    }


def check_memory(workers: int, elements: int) -> None:
    """Checks that there is memory for this number of workers.

    Raises:
        MeasurementError: if there is too little.
    """
    needed = workers * (WORKER_BYTES + 4 * COPIES * elements)
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    if free < needed:
        raise MeasurementError(
            f"{workers} workers need about {needed / 1e9:.0f} GB of memory, and {free / 1e9:.0f} "
            "GB are free. Give `--check` smaller numbers, or `--model` a smaller one."
        )


def _cluster(workers: int, args: argparse.Namespace) -> dict[str, Any]:
    """Starts a cluster of this many workers once and returns worker 0's measurements."""
    names = ("model", "rate", "density", "seconds", "batch")
    flags = {
        **{name: getattr(args, name) for name in names},
        "methods": ",".join(args.methods),
        "calibrate": int(workers == CALIBRATED),
    }
    limited = args.rate != "none"
    env = {NETWORK: str(os.getpid())} if limited else {}
    with netlab.network(workers, FAST if limited else "none") as lab:
        result = measure("benchmarks.scale.worker", lab, flags, args.timeout, env, echo=True)
    return {**result, "threads": threads(workers)}


def _specs(model: str) -> list[Any]:
    from tf_redsync.exchange.layout import TensorSpec

    variables = WORKLOADS[model].build().trainable_variables
    return [TensorSpec(v.path, tuple(v.shape), "float32", i) for i, v in enumerate(variables)]
