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
from benchmarks.peers import common
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
    logits = common.probed(lambda x: job.model(x).numpy(), args)
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
        "logits": logits if args.model in common.MODELS else None,
        "wire_bytes_per_step": None if before is None else (after - before) / count,
    }


def sent() -> int | None:
    """Returns the bytes that this worker's interface has sent; None on loopback."""
    interface = os.environ.get("TF_REDSYNC_BENCH_INTERFACE")
    return netlab.wire_bytes(interface)[0] if interface else None


if __name__ == "__main__":
    arguments = training.parser().parse_args()
    training.write(measured(arguments), arguments.output)
