"""Measurements of the workers of `scale.py` besides steps: the other parts of predictions."""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks import netlab
from benchmarks.scale import scale_methods
from benchmarks.scale.measure import FAST, NETWORK
from tf_redsync.cli.bench_worker import make_barrier

LEARNING_RATE = 1e-4  # all methods train the same weights, which must stay finite
CHAIN = 16  # dependent collectives; amortizes the cost of calling a graph
SMALL_WORDS, LARGE_WORDS = 1024, 2 * 1024 * 1024
GATHERED_FROM = 256  # a worker decodes one message so fast that only many can be timed


class Cluster:
    """The strategy, its network, and the links' rate."""

    def __init__(self) -> None:
        import tensorflow as tf

        import tf_redsync as rs
        from tf_redsync.network import collectives, strategies

        self.strategy = rs.MultiWorkerMirroredStrategy()
        self.network = collectives.for_strategy(self.strategy)
        self.workers = self.network.workers
        self.index = strategies.process_rank(self.strategy)
        self.barrier: Callable[[], None] = make_barrier(self.strategy)
        self._largest = tf.function(
            lambda own: tf.reduce_max(self.network.all_gather(own)), autograph=False
        )
        self.limited = NETWORK in os.environ

    def limit(self, rate: str) -> None:
        """Sets the rate of all links; a collective call."""
        self.barrier()
        if self.index == 0 and self.limited:
            netlab.set_rate(self.workers, rate, int(os.environ[NETWORK]))
        self.barrier()

    def slowest(self, seconds: float) -> float:
        """The maximum of all workers' values."""
        import tensorflow as tf

        return float(self._largest(tf.constant([seconds])))


def collective_seconds(cluster: Cluster, words: int, count: int) -> dict[str, float]:
    """Processor time of a collective of each kind, in a chain of `count` dependent ones.

    It is processor time because a worker's training thread also handles messages, and because
    workers that share cores wait for each other.
    """
    import tensorflow as tf

    network, workers = cluster.network, cluster.workers
    calls = {
        "all_gather": lambda x: network.all_gather(x)[0],
        "all_reduce": lambda x: network.all_reduce([x])[0],
        "all_to_all": lambda x: tf.reshape(network.all_to_all(tf.reshape(x, [workers, -1])), [-1]),
    }

    def chain(call: Callable[[Any], Any], length: int) -> Any:
        x = tf.zeros([words])
        for _ in range(length):
            x = call(x)
        return x[0]

    def seconds(call: Callable[[Any], Any], length: int) -> float:
        run = tf.function(functools.partial(chain, call, length), autograph=False)
        times = []
        for _ in range(5):
            start = time.process_time()
            run().numpy()
            cluster.barrier()
            times.append(time.process_time() - start)
        return cluster.slowest(statistics.median(times[1:]))

    return {
        kind: max(seconds(call, 1 + count) - seconds(call, 1), 1e-6) / count
        for kind, call in calls.items()
    }


def software(cluster: Cluster) -> dict[str, Any]:
    """Costs of collectives of each kind on a worker's core: per message, and per byte sent."""
    from tf_redsync.exchange import driver, traffic

    small = collective_seconds(cluster, SMALL_WORDS, CHAIN)
    large = collective_seconds(cluster, LARGE_WORDS, 1)
    payload = 4 * LARGE_WORDS
    workers = cluster.workers
    factors = {name: driver.COLLECTIVES[kind].factor for kind, name in traffic.KINDS.items()}
    sent = {name: payload * factor(workers) for name, factor in factors.items()}
    per_byte = {kind: max(large[kind] - small[kind], 0.0) / sent[kind] for kind in small}
    return {"collective_s": small, "per_byte_s": per_byte}


def update_seconds(model: Any) -> float:
    """Processor time of a plain SGD update of all variables."""
    import tensorflow as tf

    variables = [v.value for v in model.trainable_variables]
    grads = [tf.zeros(v.shape) for v in variables]

    @tf.function
    def update() -> None:
        for variable, grad in zip(variables, grads, strict=True):
            variable.assign_sub(LEARNING_RATE * grad)

    times = []
    for _ in range(10):
        start = time.process_time()
        update()
        times.append(time.process_time() - start)
    return statistics.median(times[1:])


def calibration(cluster: Cluster, model: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Inputs of predictions that steps do not give: collective costs, decoding, the update."""
    from tf_redsync.auto import probe

    cluster.limit(FAST)
    result: dict[str, Any] = {"unlimited": software(cluster)}
    result["limited"] = result["unlimited"]
    if args.rate != "none":
        cluster.limit(args.rate)
        result["limited"] = software(cluster)
    result["decode_s"] = {}
    for name in scale_methods.GROWING:
        if name in args.methods:
            cluster.barrier()
            work = probe.work(scale_methods.make(name, args.density), (2, GATHERED_FROM))
            result["decode_s"][name] = cluster.slowest(work.per_element_received)
    result["update_s"] = cluster.slowest(update_seconds(model))
    return result
