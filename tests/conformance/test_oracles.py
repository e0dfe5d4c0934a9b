"""Compares every method that names an oracle with it, step by step.

`pytest --deep` runs 50 steps for every entry of the table and number of workers, which takes long;
otherwise fewer. An oracle that follows the method's states may then differ in a tenth of the steps:
near ties round differently in float32, and nearly singular matrices amplify rounding.
"""

import functools

import numpy as np
import pytest

import tf_redsync as rs
from tests.conformance.descriptor import WORKERS
from tests.conformance.harness import initial_states, make_grads, tensors
from tests.conformance.table import TABLE, cases, is_first
from tests.deep import DEEP
from tf_redsync.exchange import loopback
from tf_redsync.exchange.layout import BucketLayout

# Eager steps of the pure-TensorFlow ops take a tenth of a second each.
STEPS = (50 if DEEP else 12) if rs.ops.backend() == "native" else 11
# For this many steps a graph is faster: tracing takes as long as 15 to 30 eager steps.
TRACED_FROM = 30


def assert_near(actual, expected, tolerance, message):
    """Asserts equal bits for tolerance 0, else a tolerance relative to the largest element."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    if tolerance == 0:
        np.testing.assert_array_equal(actual, expected, message)
    else:
        scale = max([1.0, *np.abs(expected).flat])
        np.testing.assert_allclose(
            actual, expected, rtol=0, atol=tolerance * scale, err_msg=message
        )


def assert_near_step(step, totals, residuals, tolerance, message):
    """Asserts the totals of a step, and the residuals if the oracle has them."""
    for actual, expected in zip(step.totals[-1], totals, strict=True):
        assert_near(actual, expected, tolerance, f"totals of {message}")
    assert all(("residual" in state) == (residuals is not None) for state in step.states)
    for state, of_worker in zip(step.states, residuals, strict=True) if residuals else ():
        for actual, expected in zip(state["residual"], of_worker, strict=True):
            assert_near(actual, expected, tolerance, f"residuals of {message}")


@pytest.mark.parametrize(
    ("name", "workers"),
    cases([n for n, d in TABLE.items() if d.oracle is not None], WORKERS if DEEP else (2, 3, 5)),
)
def test_equals_the_oracle(name, workers):
    descriptor = TABLE[name]
    method, specs, tolerance = descriptor.method, descriptor.specs, descriptor.tolerance
    shapes = tuple(s.shape for s in specs)
    reference = descriptor.oracle(method, specs, workers)
    layout = BucketLayout(specs, workers)
    states = initial_states(method, layout, descriptor.start)
    steps = STEPS if DEEP else min(STEPS if is_first(name) else 8, descriptor.steps)
    steps = steps if DEEP or workers == 3 else -(-steps // 5)
    run = functools.partial(loopback.run_step, method, layout)
    if steps > TRACED_FROM and descriptor.traces:
        run = loopback.traced_step(method, layout)
    follows = hasattr(reference, "follow")
    exceptions = steps // 10 if DEEP and follows else 0
    for number in range(steps):
        grads = make_grads(number, workers, shapes, seed=workers)
        step = run(tensors(grads), states, number)
        assert step.finite
        states = step.states
        message = f"{name}, {workers} workers, step {number}"
        try:
            assert_near_step(step, reference.step(grads), reference.residuals, tolerance, message)
        except AssertionError:
            exceptions -= 1
            if exceptions < 0:
                raise
        if follows:
            reference.follow(states)
