"""The training of the benchmarks' workers: a model, its data, one step as one graph."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import time
from collections.abc import Callable
from typing import Any

from benchmarks.models import (
    COMPARED,
    DATA_BATCHES,
    WORKLOADS,
    Workload,
    batches,
    set_initial_weights,
)
from benchmarks.step import step_methods
from tf_redsync.cli.bench_worker import make_barrier


@dataclasses.dataclass(frozen=True)
class Training:
    """Everything that a worker trains with.

    Attributes:
        model: The Keras model.
        optimizer: A wrapped optimizer; Keras's own for `dense`.
        step: The training step: (inputs, labels) -> loss.
        data: Batches, as tensors.
        barrier: Waits for all workers, so that they start at the same time.
        batch_size: Examples per worker and step.
        traced: After the first step, `dense_bytes`: bytes that plain MWMS sends for these
            gradients.
    """

    model: Any
    optimizer: Any
    step: Callable[..., Any]
    data: list[Any]
    barrier: Callable[[], None]
    batch_size: int
    traced: dict[str, float]

    def run(self, count: int) -> list[float]:
        """Trains; returns the wall time (ms) of each step. A call returns when its step is done."""
        times = []
        for i in range(count):
            start = time.perf_counter()
            self.step(*self.data[i % len(self.data)]).numpy()
            times.append(1e3 * (time.perf_counter() - start))
        return times

    def skipped(self) -> int:
        """Number of non-finite steps so far, which were skipped."""
        exchange = getattr(self.optimizer, "exchange", None)
        return 0 if exchange is None else int(exchange.skipped.numpy())


def worker_index() -> int:
    """This worker's number, from TF_CONFIG."""
    return int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])


def parser() -> argparse.ArgumentParser:
    """The command line that all workers share; `workers.measure` sets it."""
    result = argparse.ArgumentParser()
    result.add_argument("--method", required=True)
    result.add_argument("--model", choices=sorted(WORKLOADS), required=True)
    result.add_argument("--steps", type=int, required=True)
    result.add_argument("--warmup", type=int, required=True)
    result.add_argument("--batch", type=int)
    result.add_argument("--density", type=float)
    result.add_argument("--bucket_bytes", type=int)
    result.add_argument("--seed", type=int, default=0)
    result.add_argument("--output", required=True)
    return result


def prepare(args: argparse.Namespace) -> Training:
    """Builds everything under the strategy of `args.method`; call it once per process."""
    import keras
    import tensorflow as tf

    strategy = step_methods.strategy_for(args.method)
    workload: Workload = WORKLOADS[args.model]
    keras.utils.set_random_seed(args.seed)
    with strategy.scope():
        model = workload.build()
        if args.model in COMPARED:
            set_initial_weights(model, args.seed)
        optimizer = step_methods.optimizer_for(
            args.method, args.density, args.bucket_bytes, workload.inner
        )
        optimizer.build(model.trainable_variables)
        step_methods.make_ready(optimizer)
    batch_size = args.batch or workload.batch_size
    arrays = batches(workload, DATA_BATCHES, batch_size, args.seed + 1 + worker_index())
    data = [tuple(map(tf.constant, pair)) for pair in arrays]
    traced: dict[str, float] = {}
    alone = args.method in ("none", "none_momentum")
    step = make_step(strategy, model, optimizer, traced, 1 if alone else None)
    return Training(model, optimizer, step, data, make_barrier(strategy), batch_size, traced)


def make_step(
    strategy: Any,
    model: Any,
    optimizer: Any,
    traced: dict[str, float],
    summed: int | None = None,
) -> Callable[..., Any]:
    """Returns the training step as one graph: forward, backward, exchange, update.

    Tracing it sets `traced["dense_bytes"]`, the bytes that plain MWMS sends for these gradients.
    The exchange sums over `summed` replicas; `None` for all.
    """
    import keras
    import tensorflow as tf

    loss_of = keras.losses.sparse_categorical_crossentropy
    replicas = strategy.num_replicas_in_sync

    def replica_step(inputs: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = loss_of(labels, model(inputs, training=True), from_logits=True)
            # The exchange sums over the replicas. Keras's loss objects divide by their number in
            # newer versions only; this function never does.
            loss = tf.reduce_mean(losses) / (summed or replicas)
        variables = model.trainable_variables
        grads = tape.gradient(loss, variables)
        traced["dense_bytes"] = dense_bytes(grads, replicas)
        optimizer.apply(grads, variables)
        return loss

    @tf.function
    def step(inputs: Any, labels: Any) -> Any:
        return strategy.run(replica_step, args=(inputs, labels))

    return step


def dense_bytes(grads: list[Any], workers: int) -> float:
    """Bytes that one worker sends per step under plain MWMS, by the costs of ring collectives.

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


def write(result: dict[str, Any], path: str) -> None:
    """Writes worker 0's result; the others are not needed."""
    if worker_index() == 0:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(result, file)
