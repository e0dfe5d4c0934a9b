"""One worker of `benchmarks/step_time.py`: times the steps of one model under one method.

Started by the driver under TF_CONFIG; every worker runs the same loop, worker 0 writes the result.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from typing import Any

from benchmarks import netlab
from benchmarks.models import DATA_BATCHES, LEARNING_RATE, WORKLOADS, Workload, batches

METHODS = ("none", "dense", "rs_dense", "redsync")


def strategy_for(method: str) -> Any:
    """Returns the strategy; `dense` gets TensorFlow's own, so that it owes nothing to the rest."""
    import tensorflow as tf

    if method == "dense":
        return tf.distribute.MultiWorkerMirroredStrategy()
    import tf_redsync as rs

    return rs.MultiWorkerMirroredStrategy()


def optimizer_for(method: str, density: float) -> Any:
    """Returns the optimizer to measure; inside the strategy's scope."""
    import keras

    inner = keras.optimizers.SGD(LEARNING_RATE)
    if method == "dense":
        return inner
    import tf_redsync as rs

    if method == "none":
        return rs.DistributedOptimizer(inner, rs.NoExchange())
    if method == "rs_dense":
        return rs.DistributedOptimizer(inner, rs.Dense())
    return rs.DistributedOptimizer(inner, rs.RedSync(density=density, momentum=0.9))


def make_step(
    strategy: Any, model: Any, optimizer: Any, traced: dict[str, float]
) -> Callable[..., Any]:
    """Returns the training step as one graph: forward, backward, exchange, update.

    Tracing it puts into `traced["dense_bytes"]` what plain MWMS sends for these gradients.
    """
    import keras
    import tensorflow as tf

    loss_of = keras.losses.sparse_categorical_crossentropy
    replicas = strategy.num_replicas_in_sync

    def replica_step(inputs: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = loss_of(labels, model(inputs, training=True), from_logits=True)
            # The exchange sums over the replicas. Keras's loss objects divide by their number in
            # newer versions only, this function in none.
            loss = tf.reduce_mean(losses) / replicas
        variables = model.trainable_variables
        grads = tape.gradient(loss, variables)
        traced["dense_bytes"] = dense_bytes(grads, replicas)
        optimizer.apply(grads, variables)
        return loss

    @tf.function
    def step(inputs: Any, labels: Any) -> Any:
        return strategy.run(replica_step, args=(inputs, labels))

    return step


def measure(step: Callable[..., Any], data: list[Any], count: int) -> list[float]:
    """Returns the wall time (ms) of each of `count` steps. A call returns when its step is done."""
    times = []
    for i in range(count):
        start = time.perf_counter()
        loss = step(*data[i % len(data)])
        loss.numpy()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def make_barrier(strategy: Any) -> Callable[[], None]:
    """Returns a function that waits for all workers: their clocks start together."""
    import tensorflow as tf

    @tf.function
    def agree() -> Any:
        return strategy.reduce("SUM", strategy.run(lambda: tf.ones(())), axis=None)

    def barrier() -> None:
        agree().numpy()

    barrier()  # traced here, not between the warm-up and the measured steps
    return barrier


def trained(strategy: Any, args: argparse.Namespace, index: int) -> dict[str, Any]:
    """Builds the model, trains, and returns what was measured."""
    import keras
    import tensorflow as tf

    workload: Workload = WORKLOADS[args.model]
    keras.utils.set_random_seed(args.seed)
    with strategy.scope():
        model = workload.build()
        optimizer = optimizer_for(args.method, args.density)
        optimizer.build(model.trainable_variables)
    batch_size = args.batch or workload.batch_size
    arrays = batches(workload, DATA_BATCHES, batch_size, args.seed + 1 + index)
    data = [tuple(map(tf.constant, pair)) for pair in arrays]
    traced: dict[str, float] = {}
    step = make_step(strategy, model, optimizer, traced)
    barrier = make_barrier(strategy)
    warm_up = measure(step, data, args.warmup)
    barrier()
    before, processor = sent(), time.process_time()
    times = measure(step, data, args.steps)
    processor = time.process_time() - processor
    barrier()  # this worker is done before the other one has received its last bytes
    after = sent()
    plain = args.method == "dense"  # the optimizer is Keras's own and counts nothing
    return {
        "params": model.count_params(),
        "batch": batch_size,
        "times_ms": times,
        "warmup_ms": warm_up,
        "cpu_ms_per_step": 1e3 * processor / args.steps,
        "bytes_per_step": traced["dense_bytes"] if plain else float(optimizer.bytes_per_step()),
        "wire_bytes_per_step": None if before is None else (after - before) / args.steps,
    }


def sent() -> int | None:
    """Returns the bytes this worker's interface has sent; None on loopback."""
    interface = os.environ.get("TF_REDSYNC_BENCH_INTERFACE")
    return netlab.wire_bytes(interface)[0] if interface else None


def dense_bytes(grads: list[Any], workers: int) -> float:
    """Bytes one worker sends per step under plain MWMS, by the costs of ring collectives.

    An all-reduce of m bytes sends 2 m (P - 1) / P. An embedding's gradient (`IndexedSlices`) is
    all-gathered: m (P - 1), with m the bytes of its rows and their indices.
    """
    import tensorflow as tf

    total = 0.0
    for grad in grads:
        if isinstance(grad, tf.IndexedSlices):
            parts, factor = [grad.values, grad.indices], workers - 1
        else:
            parts, factor = [grad], 2 * (workers - 1) / workers
        total += factor * sum(math.prod(part.shape) * part.dtype.size for part in parts)
    return total


def main() -> None:
    """Command line of a worker; called by the driver only."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", choices=METHODS, required=True)
    parser.add_argument("--model", choices=sorted(WORKLOADS), required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--density", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", required=True)
    args = parser.parse_args()
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    result = trained(strategy_for(args.method), args, index)
    if index == 0:
        with open(args.output, "w", encoding="utf-8") as file:
            json.dump(result, file)


if __name__ == "__main__":
    main()
