"""Every method that names an oracle, step by step against it.

With `pytest --deep` over 50 steps for every entry of the table and number of workers, which takes
long; else over fewer.
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
# From here on a graph is faster: tracing it takes as long as 15 to 30 eager steps.
TRACED_FROM = 30


def assert_near(found, expected, tolerance, what):
    """Equal bits for tolerance 0, else relative to the largest element."""
    found, expected = np.asarray(found), np.asarray(expected)
    if tolerance == 0:
        np.testing.assert_array_equal(found, expected, what)
    else:
        scale = max([1.0, *np.abs(expected).flat])
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * scale, err_msg=what)


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
    for number in range(steps):
        grads = make_grads(number, workers, shapes, seed=workers)
        step = run(tensors(grads), states, number)
        assert step.finite
        states = step.states
        what = f"{name}, {workers} workers, step {number}"
        for found, expected in zip(step.totals[-1], reference.step(grads), strict=True):
            assert_near(found, expected, tolerance, f"totals of {what}")
        for state, residuals in zip(states, reference.residuals or [], strict=False):
            for found, expected in zip(state["residual"], residuals, strict=True):
                assert_near(found, expected, tolerance, f"residuals of {what}")
        if hasattr(reference, "follow"):
            reference.follow(states)
