"""One worker of `scale.py`: times the steps of one model, one method after the other.

Started by the driver under TF_CONFIG; all workers run the same code, worker 0 writes the result.
The links are fast while variables are created, because TensorFlow broadcasts initial values.
Methods train the same weights one after the other, and each one's state is freed before the next.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.models import WORKLOADS, batches
from benchmarks.scale import scale_methods
from benchmarks.scale.measure import FAST
from benchmarks.scale.probe import LEARNING_RATE, Cluster, calibration
from benchmarks.step.training import DATA_BATCHES, make_step, write

MOST_STEPS, FEWEST_STEPS = 20, 3


def timed_steps(cluster: Cluster, step: Callable[..., Any], data: list[Any], seconds: float):
    """Times steps for about `seconds` seconds, after one warm-up step.

    Returns:
        Medians: wall and processor time of a step, in seconds; and the number of steps.
    """
    wall, processor = [], []

    def run(i: int) -> float:
        start, cpu = time.perf_counter(), time.process_time()
        step(*data[i % len(data)]).numpy()
        wall.append(time.perf_counter() - start)
        processor.append(time.process_time() - cpu)
        return wall[-1]

    first = cluster.slowest(run(0))
    count = int(min(MOST_STEPS, max(FEWEST_STEPS, seconds / first)))
    cluster.barrier()
    wall, processor = [], []
    for i in range(count):
        run(i)
    return {
        "step_s": statistics.median(wall),
        "processor_s": statistics.median(processor),
        "steps": count,
    }


def timed_method(
    cluster: Cluster, model: Any, data: list[Any], name: str, args: argparse.Namespace
) -> dict[str, Any]:
    """Builds the optimizer of one method, and times its steps with and without the rate limit."""
    import keras

    import tf_redsync as rs

    cluster.limit(FAST)
    with cluster.strategy.scope():
        inner = keras.optimizers.SGD(LEARNING_RATE)
        method = scale_methods.make(name, args.density)
        # `NoExchange` leaves each worker with its own weights, which the next method trains.
        optimizer = rs.DistributedOptimizer(inner, method, check_every=0)
        optimizer.build(model.trainable_variables)
    step = make_step(cluster.strategy, model, optimizer, {})
    step(*data[0]).numpy()  # traces
    step(*data[1]).numpy()  # for methods that alternate and for threshold searches
    row: dict[str, Any] = {"bytes_per_step": float(optimizer.bytes_per_step())}
    if args.calibrate or args.rate == "none":
        row["unlimited"] = timed_steps(cluster, step, data, args.seconds)
    if args.rate == "none":
        row |= row["unlimited"]
    else:
        cluster.limit(args.rate)
        row |= timed_steps(cluster, step, data, args.seconds)
    if optimizer.exchange.skipped.numpy():
        raise RuntimeError(f"{name}: some steps were not finite, so their times say nothing")
    return row


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Runs all measurements of one cluster."""
    import keras
    import tensorflow as tf

    cluster = Cluster()
    workload = WORKLOADS[args.model]
    keras.utils.set_random_seed(0)
    with cluster.strategy.scope():
        model = workload.build()
    batch = args.batch or workload.batch_size
    arrays = batches(workload, DATA_BATCHES, batch, 1 + cluster.index)
    data = [tuple(map(tf.constant, pair)) for pair in arrays]
    result: dict[str, Any] = {"workers": cluster.workers, "batch": batch, "methods": {}}
    if args.calibrate:
        result["calibration"] = calibration(cluster, model, args)
    for name in args.methods:
        start = time.monotonic()
        result["methods"][name] = row = timed_method(cluster, model, data, name, args)
        gc.collect()
        if cluster.index == 0:
            print(
                f"{cluster.workers} workers, {args.rate}: {name:<18}{1e3 * row['step_s']:9.1f} ms "
                f"a step ({time.monotonic() - start:.0f} s in all)",
                flush=True,
            )
    return result


def main() -> None:
    """Runs a worker's command line; called by the driver."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=sorted(WORKLOADS), required=True)
    parser.add_argument("--methods", type=scale_methods.parse, required=True)
    parser.add_argument("--rate", required=True)
    parser.add_argument("--density", type=float, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--calibrate", type=int, required=True)
    parser.add_argument("--output", required=True)
    args = parser.parse_args()
    write(measured(args), args.output)


if __name__ == "__main__":
    main()
