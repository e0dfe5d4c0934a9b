"""Time of a method's own computation on one worker, without a network."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_redsync.exchange import loopback
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.traits import Traits

STEPS = 10  # consecutive steps: threshold search and reuse alternate
ROUNDS = 20


class Replies:
    """A method that delegates to another one and records the network's replies to worker 0."""

    traits = Traits(totals_may_overflow=False)

    def __init__(self, method):
        self.method, self.kept = method, []

    def exchange(self, grads, state, ctx):
        """The method's exchange; see `tf_redsync.Method`."""
        replies: list[Any] = []
        exchange, reply = self.method.exchange(grads, state, ctx), None
        while True:
            try:
                request = exchange.send(reply)
            except StopIteration as stop:
                if int(ctx.rank) == 0:
                    self.kept = replies
                return stop.value
            reply = yield request
            replies.append(reply)


def replay(method, layout: BucketLayout, requests: int | None) -> Callable:
    """Returns worker 0's exchange as a graph whose arguments include the network's replies.

    Args:
        method: The method.
        layout: The bucket.
        requests: Stop after this many requests; `None`: continue to totals and state.

    Returns:
        A function that returns the requests' tensors, so that the graph keeps the ops that compute
        them, and totals and state, or nothing.
    """

    @tf.function(autograph=False)
    def run(grads, state, step, replies):
        ctx = Context(layout, tf.constant(0), step)
        exchange, made = method.exchange(list(grads), state, ctx), []
        for reply in [None, *replies]:
            if len(made) == requests:
                break
            try:
                fields = vars(exchange.send(reply))
                made.append({name: field for name, field in fields.items() if name != "sent"})
            except StopIteration as stop:
                return made, stop.value
        return made, ()

    return run


def milliseconds(runs: list[Callable], arguments: tuple, seconds: float) -> list[float]:
    """Mean step time of each function in its fastest round; functions alternate."""
    grads, state, replies = arguments
    numbers = [tf.constant(i, tf.int64) for i in range(STEPS)]
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run(grads, state, numbers[0], replies)
    end = time.perf_counter() + seconds
    while not times[0] or (len(times[0]) < ROUNDS and time.perf_counter() < end):
        for run, own in zip(runs, times, strict=True):
            start = time.perf_counter()
            for number in numbers:
                result = run(grads, state, number, replies)
            tf.nest.map_structure(lambda t: t.numpy(), result)
            own.append(1e3 * (time.perf_counter() - start) / STEPS)
    return [min(own) for own in times]


def measure(method, shape, workers: int, seconds: float) -> dict[str, float]:
    """Times worker 0 of an exchange of one tensor.

    Args:
        method: The method.
        shape: Shape of the tensor.
        workers: Number of workers.
        seconds: Approximate duration of the measurement.

    Returns:
        `compress_ms`: until the last message to the network is ready. `decompress_ms`: the rest,
        until the total and the new state.
    """
    spec = TensorSpec("w", tuple(shape))
    if method.refuses(spec) is not None:
        method = method.dense()
    layout = BucketLayout((spec,), workers)
    rng = np.random.default_rng(0)
    grads = [[tf.constant(rng.laplace(size=shape), tf.float32)] for _ in range(workers)]
    states = loopback.initial_states(method, layout)
    for number in range(2):  # creates residuals and thresholds
        recorder = Replies(method)
        states = loopback.run_step(recorder, layout, grads, states, number).states
    if not recorder.kept:
        return {"compress_ms": 0.0, "decompress_ms": 0.0}
    runs = [replay(method, layout, requests) for requests in (len(recorder.kept), None)]
    compress, whole = milliseconds(runs, (grads[0], states[0], recorder.kept), seconds)
    return {"compress_ms": compress, "decompress_ms": max(0.0, whole - compress)}
