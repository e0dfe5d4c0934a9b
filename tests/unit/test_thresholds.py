"""Fixed thresholds: selection, residuals, and Strom's words."""

import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from tf_redsync.exchange import loopback
from tf_redsync.exchange.layout import BucketLayout, TensorSpec

SPEC = TensorSpec("w", (40, 50))
BOTH = (rs.contrib.FixedThreshold, rs.contrib.Strom)


def one_step(method, values, states=None, workers=1, **options):
    """Every worker has the gradient `values`; returns the step."""
    layout = BucketLayout((SPEC,), workers, **options)
    grads = [[tf.constant(values.reshape(SPEC.shape), tf.float32)]] * workers
    states = states or loopback.initial_states(method, layout)
    return loopback.run_step(method, layout, grads, states, 0)


def normal(seed=0):
    return np.random.default_rng(seed).standard_normal(SPEC.size).astype(np.float32)


@pytest.mark.parametrize("cls", BOTH)
def test_elements_at_or_above_the_threshold_are_sent(cls):
    values = normal()
    values[7] = 1.5  # equal to the threshold: selected
    step = one_step(cls(threshold=1.5, density=0.3), values, workers=2)
    reach = np.abs(values) >= 1.5
    each = np.where(reach, values if cls is rs.contrib.FixedThreshold else 1.5 * np.sign(values), 0)
    assert 0.1 * SPEC.size < reach.sum() < 0.3 * SPEC.size
    np.testing.assert_array_equal(np.reshape(step.totals[0][0], -1), 2 * np.float32(each))
    kept = np.reshape(step.states[0]["residual"][0], -1)
    np.testing.assert_array_equal(kept, values - np.float32(each))


@pytest.mark.parametrize("cls", BOTH)
def test_elements_beyond_the_capacity_stay_in_the_residual(cls):
    values = normal(1)
    step = one_step(cls(threshold=0.5, density=0.1), values)
    sent = np.flatnonzero(np.reshape(step.totals[0][0], -1))
    assert set(sent) == set(np.argsort(-np.abs(values))[:200])
    kept = np.delete(np.reshape(step.states[0]["residual"][0], -1), sent)
    np.testing.assert_array_equal(kept, np.delete(values, sent))


def test_strom_packs_index_and_sign():
    values = np.zeros(SPEC.size, np.float32)
    values[[0, 3, 1999]] = -2.0, 2.5, -7.0
    step = one_step(rs.contrib.Strom(threshold=2.0, density=0.002), values)
    words = step.requests[0].message.numpy().view(np.uint32)
    assert list(words) == [1, 3, 2**31, 3, 2**31 + 1999, 0]  # flag, count, three of four slots


def test_strom_delivers_all_gradients():
    """With a constant gradient the delivered sum lags by less than tau plus one step."""
    gradient = np.clip(0.3 * normal(2), -0.9, 0.9)
    method, states, delivered = rs.contrib.Strom(threshold=1.0, density=1.0), None, 0.0
    for _ in range(40):
        step = one_step(method, gradient, states)
        states, delivered = step.states, delivered + np.reshape(step.totals[0][0], -1)
    np.testing.assert_array_equal(delivered, np.round(delivered))  # multiples of tau
    assert np.abs(delivered - 40 * gradient).max() < 1.0 + 1e-4
    assert np.abs(delivered).max() > 30


def test_strom_drains_a_large_element_by_tau_per_step():
    values = np.eye(1, SPEC.size, 5, dtype=np.float32)[0] * 3.25
    method, states, got = rs.contrib.Strom(threshold=1.0, density=0.01), None, []
    for grads in (values, 0 * values, 0 * values, 0 * values):
        step = one_step(method, grads, states)
        states = step.states
        got.append(float(np.sum(step.totals[0][0])))
    assert got == [1.0, 1.0, 1.0, 0.0] and np.sum(states[0]["residual"][0]) == 0.25


@pytest.mark.parametrize("cls", BOTH)
def test_totals_as_coordinates_are_equal(cls):
    method, values = cls(threshold=2.5, density=0.02), normal(3)
    dense = one_step(method, values, workers=2).totals[0][0]
    short = one_step(method, values, workers=2, sparse_totals=True).totals[0][0]
    added = np.zeros(SPEC.size, np.float32)
    np.add.at(added, short.indices.numpy().view(np.int32), short.values.numpy())
    np.testing.assert_array_equal(added, np.reshape(dense, -1))
    assert added.any()


def test_describe():
    assert rs.contrib.Strom(threshold=0.01).describe(SPEC) == ">= 0.01, at most 20 elements"


@pytest.mark.parametrize("cls", BOTH)
@pytest.mark.parametrize(
    "options", [{"threshold": -1.0}, {"threshold": np.inf}, {"density": 0.0}, {"dense_below": -1}]
)
def test_bad_input(cls, options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"`{name}`.*Received: {name}={value!r}"):
        cls(**options)


def test_strom_needs_a_threshold():
    with pytest.raises(ValueError, match="`threshold` must be in \\(0, inf\\).*threshold=0.0"):
        rs.contrib.Strom(threshold=0.0)


@pytest.mark.parametrize("cls", BOTH)
def test_small_tensors_and_biases_are_rejected(cls):
    assert "rank 1" in cls().refuses(TensorSpec("bias", (5000,)))
    assert "dense_below" in cls().refuses(TensorSpec("w", (31, 33)))
    assert cls().refuses(TensorSpec("w", (32, 32))) is None


def test_strom_rejects_tensors_whose_indices_exceed_31_bits():
    """Bit 31 of an index would be read as the sign of its value."""
    assert rs.contrib.Strom().refuses(TensorSpec("w", (2**16, 2**15))) is None
    assert "31 bits" in rs.contrib.Strom().refuses(TensorSpec("w", (2**16, 2**15 + 1)))
