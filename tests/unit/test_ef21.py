"""EF21 converges to the sum of constant gradients."""

import numpy as np
import tensorflow as tf

import tf_redsync as rs
from tests.oracle.ef21 import EF21Oracle
from tf_redsync.exchange import loopback
from tf_redsync.exchange.layout import BucketLayout, TensorSpec

SPECS = (TensorSpec("w", (20, 10)),)


def test_constant_gradients_are_learned_in_one_over_density_steps():
    method, layout = rs.contrib.EF21(density=0.25), BucketLayout(SPECS, 3)
    rng = np.random.default_rng(3)
    grads = [rng.normal(size=(20, 10)).astype("f4") for _ in range(3)]
    states, wrong = loopback.initial_states(method, layout), []
    for number in range(6):
        step = loopback.run_step(method, layout, [[tf.constant(g)] for g in grads], states, number)
        states = step.states
        wrong.append(float(np.abs(step.totals[0][0].numpy() - sum(grads)).max()))
    assert wrong[0] > 0.1 and wrong[2] > 1e-3
    assert max(wrong[3:]) < 1e-5  # a residual would have delivered some elements twice


def test_total_is_the_sum_of_the_estimates():
    method, layout = rs.contrib.EF21(density=0.1), BucketLayout(SPECS, 2)
    rng, states = np.random.default_rng(5), loopback.initial_states(method, layout)
    for number in range(10):
        grads = [[tf.constant(rng.normal(size=(20, 10)), tf.float32)] for _ in range(2)]
        step = loopback.run_step(method, layout, grads, states, number)
        states = step.states
        estimates = sum(s["estimate"][0].numpy() for s in states)
        np.testing.assert_allclose(step.totals[0][0], estimates, atol=1e-5)
        np.testing.assert_array_equal(states[0]["total"][0], states[1]["total"][0])


def test_estimates_start_with_the_last_dense_gradient():
    """As in the paper, g_i starts with the gradient at the first point; so does the oracle."""
    method, layout, rng = (
        rs.contrib.EF21(density=0.1),
        BucketLayout(SPECS, 2),
        np.random.default_rng(7),
    )
    steps = [[[rng.normal(size=(20, 10)).astype("f4")] for _ in range(2)] for _ in range(6)]
    reference, states = EF21Oracle([(20, 10)], 2, 0.1), loopback.initial_states(method, layout)
    for number, grads in enumerate(steps):
        phase = "dense_exchange" if number < 2 else "exchange"
        inputs = [[tf.constant(g) for g in worker] for worker in grads]
        step = loopback.run_step(method, layout, inputs, states, number, phase)
        states = step.states
        if number < 2:
            reference.estimates = [list(worker) for worker in grads]
            reference.total = [grads[0][0] + grads[1][0]]
            np.testing.assert_array_equal(step.totals[0][0], reference.total[0])
        else:
            np.testing.assert_array_equal(step.totals[0][0], reference.step(grads)[0])
        for rank in range(2):
            np.testing.assert_array_equal(states[rank]["estimate"][0], reference.estimates[rank][0])
            np.testing.assert_array_equal(states[rank]["total"][0], reference.total[0])
