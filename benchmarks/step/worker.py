"""One worker of `benchmarks/step/step_time.py`: times the steps of one model under one method.

Started by the driver under TF_CONFIG; every worker runs the same loop, worker 0 writes the result.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from typing import Any

from benchmarks import netlab
from benchmarks.models import COMPARED, probe_logits
from benchmarks.step import step_methods, training


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Trains, and returns the measurements."""
    begin = time.perf_counter()
    job = training.prepare(args)
    start = {"build": time.perf_counter() - begin}
    period = step_methods.period_of(job.optimizer)
    count = period * math.ceil(args.steps / period)
    before_all = max(args.warmup, step_methods.trial_steps(job.optimizer))
    warm_up = job.run(period * math.ceil(before_all / period))
    start["first_step"] = warm_up[0] / 1e3
    skipped = job.skipped()
    job.barrier()
    before, processor = sent(), time.process_time()
    times = job.run(count)
    processor = time.process_time() - processor
    job.barrier()  # the other worker may not have received this worker's last bytes yet
    after = sent()
    plain = args.method in step_methods.PLAIN  # the optimizer is Keras's own and counts nothing
    return {
        "params": job.model.count_params(),
        "batch": job.batch_size,
        "period": period,
        "times_ms": times,
        "warmup_ms": warm_up,
        "start_s": start,
        "skipped": job.skipped() - skipped,
        "cpu_ms_per_step": 1e3 * processor / count,
        "bytes_per_step": job.traced["dense_bytes"]
        if plain
        else float(job.optimizer.bytes_per_step()),
        "logits": _logits(job, args),
        "wire_bytes_per_step": None if before is None else (after - before) / count,
    }


def _logits(job: training.Training, args: argparse.Namespace) -> list[list[float]] | None:
    """Returns logits to compare with other workers and libraries, for the compared models."""
    if args.model not in COMPARED:
        return None
    return probe_logits(args.model, lambda x: job.model(x).numpy(), args.seed)


def sent() -> int | None:
    """Returns the bytes that this worker's interface has sent; None on loopback."""
    interface = os.environ.get("TF_REDSYNC_BENCH_INTERFACE")
    return netlab.wire_bytes(interface) if interface else None


if __name__ == "__main__":
    arguments = training.parser().parse_args()
    training.write(measured(arguments), arguments.output)
