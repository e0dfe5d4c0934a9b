"""Measurements for the cost model: collectives of this cluster, and methods on this device."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_redsync.auto.cost import Line, Link, Work, hops
from tf_redsync.exchange import driver, loopback
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.driver import Network, checked, drive
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.method import Method, initial_state
from tf_redsync.exchange.requests import AllGather, AllReduce, AllToAll, Request
from tf_redsync.exchange.traffic import KINDS, DryRun
from tf_redsync.ops.sparse import SparseTotal, descended

# Sizes of the probes. A collective is timed with increasing sizes until it takes LONG_SECONDS.
SMALL_BYTES = 4 * 1024
LARGE_BYTES = tuple(256 * 1024 * 4**i for i in range(4))  # 256 KiB to 16 MiB
LONG_SECONDS = 0.01
REPEATS = 3
SMALL_SHAPE, LARGE_SHAPE = (128, 128), (1024, 2048)


def link(network: Network) -> Link:
    """Measure the collectives between the workers; all workers must call it at the same point.

    Every worker returns the same numbers: the result, and the times that decide on further
    collectives, are means over the workers.

    Args:
        network: Network of at least two workers, whose collectives also run outside of a replica.
    """
    workers = network.workers

    def gather(words: tf.Tensor) -> tf.Tensor:
        return network.all_gather(tf.zeros([words], tf.int32))

    def reduce(words: tf.Tensor) -> tf.Tensor:
        return network.all_reduce([tf.zeros([words])])[0]

    def exchange(words: tf.Tensor) -> tf.Tensor:
        return network.all_to_all(tf.zeros([workers, -(-words // workers)], tf.int32))

    collectives: dict[type[Request], Callable[[tf.Tensor], tf.Tensor]] = {
        AllGather: gather,
        AllReduce: reduce,
        AllToAll: exchange,
    }
    lines = {
        KINDS[kind]: _line(kind, _Timer(network, collective), workers)
        for kind, collective in collectives.items()
    }
    return Link(**lines)


class _Timer:
    """Timer of a collective of any number of words, with means over the workers."""

    def __init__(self, network: Network, collective: Callable[[tf.Tensor], tf.Tensor]):
        self._network = network
        words = tf.TensorSpec([], tf.int32)
        self._run = tf.function(collective, input_signature=[words], autograph=False)
        self._mean = tf.function(self._mean_of, autograph=False)
        self(SMALL_BYTES, 1)  # traces

    def _mean_of(self, values: tf.Tensor) -> tf.Tensor:
        return self._network.all_reduce([values])[0] / self._network.workers

    def __call__(
        self, size: int, repeats: int, middle: Callable[..., Any] = statistics.median
    ) -> float:
        """Return the seconds for a payload: the mean over workers of `middle` of their times."""
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            wait(self._run(size // 4))
            times.append(time.perf_counter() - start)
        return float(self._mean(tf.constant(middle(times), tf.float32)))


def _line(kind: type[Request], timer: _Timer, workers: int) -> Line:
    """Return latency and rate from a small payload and one that is large for this network."""
    small = timer(SMALL_BYTES, 2 * REPEATS, min)  # min: other load only adds time
    size = next((n for n in LARGE_BYTES[:-1] if timer(n, 1) >= LONG_SECONDS), LARGE_BYTES[-1])
    large = timer(size, REPEATS)
    factor = driver.COLLECTIVES[kind].factor(workers)
    seconds = max(large - small, 1e-6)  # may be negative by noise
    rate = factor * (size - SMALL_BYTES) / seconds
    latency = max(small - factor * SMALL_BYTES / rate, 0.0) / hops(KINDS[kind], workers)
    return Line(latency, rate)


def work(method: Method, workers: Sequence[int], sparse_totals: bool = False) -> Work:
    """Measure a method's computation on this device, without a network.

    The exchange runs on random gradients of a small and of a large matrix, and receives its own
    messages.

    Args:
        method: The method.
        workers: Numbers of workers to measure with. With one number all work counts per element;
            two or more separate selection from decoding.
        sparse_totals: Whether totals may be sparse. The time of their update is then
            added, and that of a dense update, which they replace, is subtracted.
    """
    most, fewest = max(workers), min(workers)
    seconds = functools.partial(_exchange_seconds, method, sparse_totals=sparse_totals)
    small, large = seconds(SMALL_SHAPE, fewest), seconds(LARGE_SHAPE, fewest)
    n, m = math.prod(SMALL_SHAPE), math.prod(LARGE_SHAPE)
    per_element = max(large - small, 0.0) / (m - n)
    received = 0.0
    if most > fewest:
        larger = seconds(LARGE_SHAPE, most)
        received = max(larger - large, 0.0) / (m * (most - fewest))
        received = min(received, per_element / fewest)
    return Work(max(small - n * per_element, 0.0), per_element - fewest * received, received)


def _exchange_seconds(
    method: Method, shape: tuple[int, int], workers: int, sparse_totals: bool
) -> float:
    """Return the seconds of a method's step for one matrix, in the steady state.

    The result is the median over `REPEATS` of the mean over a period of steps. See `work`.
    """
    layout = BucketLayout((TensorSpec("w", shape),), workers, 0, sparse_totals)
    if method.refuses(layout.specs[0]) is not None:
        return 0.0
    in_coordinates = False

    @tf.function(autograph=False)
    def run(grads: Any, state: Any, step: tf.Tensor, rate: tf.Tensor) -> Any:
        nonlocal in_coordinates
        network = DryRun(workers)
        ctx = Context(layout, network.rank(), step)
        exchange = checked(method, method.exchange, list(grads), state, ctx)
        ((total,), state), *_ = drive([exchange], network).results
        in_coordinates = isinstance(total, SparseTotal)
        if in_coordinates:
            total = descended(tf.fill(shape, rate), total, rate)
        return total, state

    grads = [_gradient(shape)]
    state = initial_state(method, layout)
    times = []
    for i in range(2 + REPEATS * method.traits.period):
        step = tf.constant(loopback.STEADY_STEP + i, tf.int64)
        start = time.perf_counter()
        total, state = run(grads, state, step, tf.constant(0.01))
        wait(total)
        times.append(time.perf_counter() - start)
    steps = times[2:]  # the first step traces, the second finds thresholds
    starts = range(0, len(steps), method.traits.period)
    periods = (statistics.fmean(steps[i : i + method.traits.period]) for i in starts)
    return statistics.median(periods) - (_update_seconds(shape) if in_coordinates else 0.0)


@functools.lru_cache(maxsize=2)  # one for all methods: 8 MiB
def _gradient(shape: tuple[int, int]) -> tf.Tensor:
    return tf.random.stateless_normal(shape, (1, 2), alg="philox")


@functools.lru_cache
def _update_seconds(shape: tuple[int, int]) -> float:
    """Return the median seconds of plain SGD's update of a matrix by a dense total."""

    @tf.function(autograph=False)
    def run(total: tf.Tensor, rate: tf.Tensor) -> tf.Tensor:
        return tf.fill(shape, rate) - rate * total

    total, times = tf.zeros(shape), []
    for _ in range(2 + REPEATS):
        start = time.perf_counter()
        wait(run(total, tf.constant(0.01)))
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def slowest(network: Network, rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the elementwise maximum of all workers' `rows`; all workers must call it.

    Args:
        network: The network.
        rows: Numbers of this worker, with equal shapes on all workers.
    """
    words = tf.bitcast(tf.constant(rows, tf.float32), tf.int32)
    everyone = tf.function(network.all_gather, autograph=False)(tf.reshape(words, [-1]))
    most = tf.reduce_max(tf.bitcast(everyone, tf.float32), axis=0)
    return tf.reshape(most, words.shape).numpy().tolist()


def wait(result: Any) -> None:
    """Wait for tensors, because ops on a GPU run asynchronously."""
    for tensor in tf.nest.flatten(result):
        tf.reshape(tensor, [-1])[:1].numpy()
