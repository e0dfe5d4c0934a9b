"""Runs a method of the table on the loopback and records what the laws check."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import tensorflow as tf

from tests.conformance.descriptor import SHAPES
from tests.conformance.table import TABLE
from tf_redsync.exchange import loopback
from tf_redsync.exchange.layout import BucketLayout

STEPS = 3


@dataclasses.dataclass(frozen=True)
class Record:
    """Inputs (copied before the step) and outputs of one step."""

    number: int
    grads: list[list[np.ndarray]]  # [worker][tensor]
    old_states: list[dict[str, list[np.ndarray]]]
    new_states: list[dict[str, list[np.ndarray]]]
    totals: list[list[np.ndarray]]
    step: loopback.LoopbackStep


def make_grads(step: int, workers: int, shapes=SHAPES, seed: int = 0) -> list[list[np.ndarray]]:
    """Gradients of several kinds: normal, heavy-tailed, constant and mostly zero."""
    rng = np.random.default_rng([seed, step, workers])
    kinds = (
        rng.standard_normal,
        lambda shape: rng.standard_t(2, shape),
        lambda shape: np.full(shape, -0.3),
        lambda shape: rng.standard_normal(shape) * (rng.random(shape) < 0.02),
    )
    return [
        [
            np.asarray(kinds[(worker + step) % len(kinds)](shape), np.float32).reshape(shape)
            for shape in shapes
        ]
        for worker in range(workers)
    ]


def copied(state: Any) -> Any:
    """The state as copied arrays: an eager tensor's `numpy()` may share memory."""
    return tf.nest.map_structure(lambda t: np.array(t, copy=True), state)


def tensors(arrays: Any) -> Any:
    return tf.nest.map_structure(lambda a: tf.constant(a, a.dtype), arrays)


def initial_states(method, layout, start=None) -> list[Any]:
    """Initial states, from the method or from the descriptor's `start`."""
    if start is None:
        return loopback.initial_states(method, layout)
    return [start(method, layout.specs) for _ in range(layout.workers)]


def run(method, workers: int, specs, phase="exchange", steps=STEPS, start=None) -> list[Record]:
    layout = BucketLayout(specs, workers)
    shapes = tuple(s.shape for s in specs)
    states = initial_states(method, layout, start)
    records = []
    for number in range(steps):
        grads = make_grads(number, workers, shapes)
        inputs = tensors(grads)
        old = copied(states)
        step = loopback.run_step(method, layout, inputs, states, number, phase)
        # Checks purity here, because later code does not see the inputs again.
        assert_equal_bits(copied(states), old, "the step changed a state that it was given")
        assert_equal_bits(copied(inputs), grads, "the step changed a gradient that it was given")
        states = step.states
        records.append(Record(number, grads, old, copied(states), copied(step.totals), step))
    return records


@functools.cache
def recorded(name: str, workers: int, phase: str = "exchange") -> list[Record]:
    descriptor = TABLE[name]
    return run(descriptor.method, workers, descriptor.specs, phase, start=descriptor.start)


def assert_equal_bits(actual: Any, expected: Any, message: str = "") -> None:
    """Asserts the same structure, dtypes, shapes and bits."""
    tf.nest.assert_same_structure(actual, expected)
    for f, e in zip(tf.nest.flatten(actual), tf.nest.flatten(expected), strict=True):
        f, e = np.asarray(f), np.asarray(e)
        assert (f.dtype, f.shape) == (e.dtype, e.shape), message
        assert f.tobytes() == e.tobytes(), f"{message}: {f} != {e}"
