"""One worker of `timeline.py`: worker 0 records steps with TensorFlow's profiler."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from typing import Any

from benchmarks.step import anatomy, step_methods, trace_events, training

STEP = "train"
_TYPES = {
    "AllGather": "Gather",
    "AllReduce": "Reduce",
    "AllToAll": "AllToAll",
    "PairGather": "Gather",
}


def requests_of(optimizer: Any) -> list[dict[str, Any]]:
    """Returns the requests of a step in order.

    Returns:
        For each, `type`, that of the collective op, and `tensors`, the names of the bucket's.
    """
    import tensorflow as tf

    from tf_redsync.exchange.context import Context

    if not hasattr(optimizer, "exchange"):
        return []
    found = []
    with tf.Graph().as_default():
        zero = tf.constant(0, tf.int64)
        for bucket in optimizer.exchange.schedule.buckets:
            layout, method = bucket.layout, bucket.method
            grads = [tf.zeros(spec.shape) for spec in layout.specs]
            ctx = Context(layout, tf.constant(0), zero)
            exchange = method.exchange(grads, method.init(layout), ctx)
            found.append((layout, _types(exchange, layout.workers)))
    return [
        {"type": types[number], "tensors": [spec.name for spec in layout.specs]}
        for number in range(max((len(types) for _, types in found), default=0))
        for layout, types in found
        if number < len(types)
    ]


def _types(exchange: Any, workers: int) -> list[str]:
    from tf_redsync.exchange.driver import drive
    from tf_redsync.exchange.traffic import DryRun

    types = []

    def listen():
        reply = None
        while True:
            try:
                request = exchange.send(reply)
            except StopIteration as stop:
                return stop.value
            types.append(f"Collective{_TYPES[type(request).__name__]}V2")
            reply = yield request

    drive([listen()], DryRun(workers))
    return types


def recorded(args: argparse.Namespace) -> dict[str, Any]:
    """Trains without and with the profiler; returns the recording of worker 0."""
    import tensorflow as tf

    job = training.prepare(args)
    job.run(max(args.warmup, step_methods.trial_steps(job.optimizer)))
    job.barrier()
    plain = job.run(args.steps)
    inner = getattr(job.optimizer, "inner_optimizer", job.optimizer)
    wrapped = inner is not job.optimizer
    graph = job.step.get_concrete_function(*job.data[0]).graph
    result = {
        "batch": job.batch_size,
        "model": job.model.name,
        "scope": inner.name,
        "roles": anatomy.roles(graph, inner.name) if wrapped else {},
        "requests": requests_of(job.optimizer),
        "plain_ms": plain,
    }
    first = training.worker_index() == 0
    with tempfile.TemporaryDirectory() as folder:
        if first:
            options = tf.profiler.experimental.ProfilerOptions(
                host_tracer_level=2, python_tracer_level=0, device_tracer_level=0
            )
            tf.profiler.experimental.start(folder, options)
        job.barrier()
        for number in range(args.steps):
            with tf.profiler.experimental.Trace(STEP, step_num=number, _r=1):
                job.run(1)
        if first:
            tf.profiler.experimental.stop()
            steps, ops = trace_events.host_events(trace_events.read(folder), STEP)
            result["steps"] = [dataclasses.astuple(event) for event in steps]
            result["ops"] = [dataclasses.astuple(event) for event in ops]
    job.barrier()
    return result


if __name__ == "__main__":
    arguments = training.parser().parse_args()
    training.write(recorded(arguments), arguments.output)
