"""Wangni: probabilities, sampling, means, variances, codings, bad input."""

import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from tests.loops import loop
from tests.oracle.unbiased import greedy_probabilities
from tf_redsync import codings
from tf_redsync.contrib.wangni import ROUNDS, probabilities, sampled
from tf_redsync.exchange import loopback
from tf_redsync.exchange.layout import BucketLayout, TensorSpec

RNG = np.random.default_rng(0)
INPUTS = {
    "normal": RNG.standard_normal(2000),
    "heavy": RNG.standard_t(1, 2000),
    "log normal": RNG.lognormal(sigma=3, size=2000),
    "constant": np.full(2000, -0.3),
    "mostly zero": RNG.standard_normal(2000) * (RNG.random(2000) < 0.3),
}
every_input = loop("name", INPUTS)
DENSITIES = (0.002, 0.05, 0.25)


def total_of(method, grads, number=0, states=None):
    layout = BucketLayout((TensorSpec("w", np.shape(grads[0])),), len(grads))
    inputs = [[tf.constant(g, tf.float32)] for g in grads]
    states = states or loopback.initial_states(method, layout)
    step = loopback.run_step(method, layout, inputs, states, number)
    assert step.finite
    return np.array(step.totals[0][0]), step.states


def best_probabilities(g, count):
    """Returns min(c |g|, 1) with the c for which they sum to `count`, by bisection."""
    low, high = 0.0, 1e12
    for _ in range(200):
        c = (low + high) / 2
        low, high = (c, high) if np.minimum(c * np.abs(g), 1).sum() < count else (low, c)
    return np.minimum(high * np.abs(g), 1)


def variance(g, p):
    """Returns the variance of the total: an element with probability p is sent as g / p."""
    used = g != 0
    return np.sum(g[used] ** 2 * (1 / p[used] - 1))


@loop("density", DENSITIES)
@every_input
def test_probabilities_match_the_greedy_algorithm(name, density):
    g, count = INPUTS[name], round(2000 * density)
    found = probabilities(tf.constant(g, tf.float32), count).numpy()
    expected = greedy_probabilities(g.astype("f4"), count, ROUNDS)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    assert found.sum() == pytest.approx(count, rel=0.01) and found.sum() <= count + 1e-9
    assert found.min() >= 0 and found.max() <= 1


@loop("density", DENSITIES)
@every_input
def test_variance_is_near_the_minimum(name, density):
    g, count = np.float64(INPUTS[name].astype("f4")), round(2000 * density)
    p = probabilities(tf.constant(g, tf.float32), count).numpy()
    best = variance(g, best_probabilities(g, count))
    assert (1 - 1e-9) * best <= variance(g, p) <= 1.02 * best + 1e-9
    if name in ("normal", "heavy", "log normal"):  # random-k: equal probabilities
        assert variance(g, p) < 0.8 * variance(g, np.full(2000, density))


def test_fewer_nonzero_elements_than_the_density():
    g = np.zeros(100, np.float32)
    g[[3, 50, 99]] = 1, -2, 3
    p = probabilities(tf.constant(g), 10).numpy()
    np.testing.assert_array_equal(p, g != 0)
    np.testing.assert_array_equal(total_of(rs.contrib.Wangni(density=0.1), [g])[0], g)
    np.testing.assert_array_equal(total_of(rs.contrib.Wangni(density=0.1), [0 * g])[0], 0 * g)


@every_input
def test_marginals_of_many_draws(name):
    """Each element with its probability; in all sum p of them, rounded up or down."""
    p = probabilities(tf.constant(INPUTS[name][:200], tf.float32), 10)
    u = tf.constant(np.random.default_rng(1).random((20_000, 1)))
    taken = sampled(p, u).numpy()
    p = p.numpy()
    assert set(taken.sum(axis=1)) <= {np.floor(p.sum()), np.ceil(p.sum()), np.round(p.sum())}
    deviation = np.sqrt(p * (1 - p) / 20_000)
    assert np.all(np.abs(taken.mean(axis=0) - p) <= 5 * deviation + 1e-12)


def test_totals_are_unbiased_with_minimal_variance():
    g, draws = INPUTS["normal"][:300].astype("f4"), 400
    method, workers = rs.contrib.Wangni(density=0.1), 2
    layout = BucketLayout((TensorSpec("w", g.shape),), workers)
    step, inputs = loopback.traced_step(method, layout), [[tf.constant(g)]] * workers
    totals = [step(inputs, [{}] * workers, number).totals[0][0] for number in range(draws)]
    error = np.float64(np.stack(totals)) - workers * g
    p = greedy_probabilities(g, 30, ROUNDS)
    deviation = np.abs(g) * np.sqrt(workers * (1 / p - 1) / draws)
    assert np.all(np.abs(error.mean(axis=0)) <= 5 * deviation + 1e-6)
    found = np.square(error).sum(axis=1).mean()
    assert found == pytest.approx(workers * variance(np.float64(g), p), rel=0.05)


def test_overflowing_value_skips_the_step():
    """A hundredth of the elements is sent, each multiplied by 100: 3.5e36 overflows float32."""
    layout = BucketLayout((TensorSpec("w", (500,)),), 2)
    grads = [[tf.fill([500], value)] for value in (1.0, 3.5e36)]
    step = loopback.run_step(rs.contrib.Wangni(density=0.01), layout, grads, [{}, {}], 0)
    assert not step.finite


def test_draws_differ_by_worker_seed_and_step():
    g = np.ones((20, 50), np.float32)
    first = total_of(rs.contrib.Wangni(density=0.01), [g])[0] != 0
    assert first.sum() == 10
    for other in (
        total_of(rs.contrib.Wangni(density=0.01, seed=1), [g])[0],
        total_of(rs.contrib.Wangni(density=0.01), [g], number=1)[0],
        total_of(rs.contrib.Wangni(density=0.01), [0 * g, g])[0],
    ):
        assert not np.array_equal(other != 0, first)


# ------------------------------------------------------------------------------------- coded


@pytest.mark.parametrize(
    "indices", [codings.Cheapest(), codings.Golomb(), codings.EliasFano(), codings.RawIndices()]
)
@pytest.mark.parametrize("values", [codings.Float32(), codings.Half()])
def test_coded_messages_conserve_gradients(indices, values):
    """A residual compensates the code's error; without one there is no error."""
    g = INPUTS["heavy"].reshape(40, 50).astype("f4")
    inner = rs.contrib.Wangni(density=0.05)
    plain, states = total_of(inner, [g, -2 * g])
    assert states == [{}, {}]
    method = rs.Coded(method=inner, indices=indices, values=values)
    coded, states = total_of(method, [g, -2 * g])
    kept = sum(np.array(s["residual"][0]) for s in states)
    scale = np.abs(plain).max()
    np.testing.assert_allclose(coded + kept, plain, rtol=0, atol=1e-6 * scale)
    if isinstance(indices, codings.RawIndices) and isinstance(values, codings.Float32):
        np.testing.assert_array_equal(coded, plain)
    # The residual is added to the next gradient: without one, only the gradient is sent.
    again, after = total_of(method, [0 * g, 0 * g], 1, states)
    left = sum(np.array(s["residual"][0]) for s in after)
    if np.count_nonzero(kept) <= 100:
        np.testing.assert_allclose(again + left, kept, rtol=0, atol=1e-6 * scale)


def test_clusters_leave_no_residual():
    """Positions in a few clusters have long gaps, which fit into the capacity of Golomb's code."""
    g = np.zeros((400, 100), np.float32)
    g[::40, :40] = 1.0 + np.arange(40)
    method = rs.Coded(method=rs.contrib.Wangni(density=0.01), indices=codings.Golomb())
    coded, states = total_of(method, [g])
    plain, _ = total_of(method.method, [g])
    np.testing.assert_array_equal(coded, plain)
    assert not np.any(states[0]["residual"][0])


def test_half_precision_has_no_residual():
    with pytest.raises(ValueError, match="`method`.*Received: method=Wangni"):
        rs.HalfPrecision(method=rs.contrib.Wangni())


@pytest.mark.parametrize("shape", [(), (0, 4), (1,)])
def test_scalars_and_empty_tensors(shape):
    total, _ = total_of(rs.contrib.Wangni(), [np.full(shape, 2.0)] * 2)
    np.testing.assert_array_equal(total, np.full(shape, 4.0))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nonfinite_value_skips_the_step(bad):
    g = np.ones((20, 30), np.float32)
    g[7, 7] = bad
    layout = BucketLayout((TensorSpec("w", g.shape),), 1)
    assert not loopback.run_step(rs.contrib.Wangni(), layout, [[tf.constant(g)]], [{}], 0).finite


@pytest.mark.parametrize(
    ("name", "value"), [("density", 0.0), ("density", 1.5), ("seed", -1), ("dense_below", -1)]
)
def test_bad_input(name, value):
    with pytest.raises(ValueError, match=f"`{name}`.*Received: {name}={value!r}"):
        rs.contrib.Wangni(**{name: value})
