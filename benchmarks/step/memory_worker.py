"""One worker of `benchmarks/step/memory.py`: the peak memory of one method's steps."""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import Any

from benchmarks.step import step_methods, training


def process_bytes(name: str) -> int:
    """Returns "VmRSS" of this process in bytes, or "VmHWM", its peak so far."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {name}")


def reset_process_peak() -> None:
    """Resets VmHWM to VmRSS."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def variable_bytes(variables: Any) -> int:
    """Returns the bytes of variables (of Keras or TensorFlow) on one worker."""
    import tensorflow as tf

    return sum(
        tf.as_dtype(v.dtype).size * int(tf.TensorShape(v.shape).num_elements()) for v in variables
    )


def known_bytes(job: training.Training) -> dict[str, int]:
    """Returns the bytes of all values that live from step to step."""
    import tensorflow as tf

    exchange = getattr(job.optimizer, "exchange", None)
    return {
        "params": variable_bytes(job.model.variables),
        "slots": variable_bytes(job.optimizer.variables),
        "exchange": 0 if exchange is None else variable_bytes(exchange.variables),
        "data": sum(t.dtype.size * int(tf.size(t)) for t in tf.nest.flatten(job.data)),
    }


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Trains, and returns the measurements."""
    import tensorflow as tf

    base = process_bytes("VmRSS")
    job = training.prepare(args)
    period = step_methods.period_of(job.optimizer)
    job.run(max(args.warmup, period, step_methods.trial_steps(job.optimizer)))
    gc.collect()
    device = tf.config.experimental
    job.barrier()
    device.reset_memory_stats("CPU:0")
    reset_process_peak()
    rest = device.get_memory_info("CPU:0")["current"]
    job.run(max(args.steps, period))
    peak = device.get_memory_info("CPU:0")["peak"]
    process_peak = process_bytes("VmHWM")
    job.barrier()
    return {
        "known": known_bytes(job),
        "rest": rest,
        "peak": peak,
        "process_base": base,
        "process_peak": process_peak,
        "skipped": job.skipped(),
    }


if __name__ == "__main__":
    arguments = training.parser().parse_args()
    training.write(measured(arguments), arguments.output)
