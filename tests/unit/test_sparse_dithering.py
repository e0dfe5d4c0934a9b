"""Sparse dithering: bounds of its error and code length, filled bits, bad input."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from tf_redsync.exchange import loopback
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout, TensorSpec, make_buckets
from tf_redsync.step.exchange_schedule import ExchangeSchedule

ALPHAS = (0.9, 0.5, 0.1, 0.03, 0.001, 1e-6)
every_alpha = pytest.mark.parametrize("alpha", ALPHAS)


def run(method, grads):
    layout = BucketLayout((TensorSpec("w", np.shape(grads[0])),), len(grads))
    inputs = [[tf.constant(g, tf.float32)] for g in grads]
    states = loopback.initial_states(method, layout)
    return loopback.run_step(method, layout, inputs, states, 0)


def error_of(method, g):
    """Returns a total's relative squared error; asserts that the residual equals it."""
    step = run(method, [g])
    assert step.finite
    total, residual = np.array(step.totals[0][0]), np.array(step.states[0]["residual"][0])
    np.testing.assert_allclose(total + residual, g, rtol=0, atol=1e-6 * np.abs(g).max())
    return np.square(np.float64(residual)).sum() / max(np.square(np.float64(g)).sum(), 1e-300)


def levels_of(g, alpha):
    """Returns |k| of the paper's formula."""
    u, h = np.abs(g) / np.linalg.norm(g), np.sqrt(alpha / g.size)
    return np.rint(u / (2 * h))


def worst_cases(alpha, size=4000):
    """Returns worst-case vectors: equal levels in some elements, zeros elsewhere."""
    rng = np.random.default_rng(0)
    h = np.sqrt(alpha / size)
    yield rng.standard_normal(size)
    yield rng.standard_t(1, size)
    yield rng.standard_normal(size) * (rng.random(size) < 0.02)
    yield np.eye(1, size)[0]
    for share, side in itertools.product((0.1, 0.5, 0.8, 1.0), (1, -1, 0)):
        n = max(1, int(share * size))
        # Just above the midpoint of two levels: each k is half a step more than |u| / 2 h.
        k = max(1.0, np.floor(1 / (2 * h * np.sqrt(n)) + 0.5))
        x = np.zeros(size)
        x[:n] = 2 * h * (k - 0.5) * (1 + 1e-4)
        signs = rng.choice([-1.0, 1.0], n) if side == 0 else side
        x[:n] *= signs
        rest = 1 - np.square(x).sum()
        if rest > 0:  # the norm must be 1: the last element takes the rest
            x[-1] += np.sqrt(rest)
        yield x / np.linalg.norm(x)


@every_alpha
def test_error_is_at_most_alpha_and_every_code_fits(alpha):
    """A code beyond the capacity raises; the error bound holds for any vector."""
    method = rs.contrib.SparseDithering(alpha=alpha)
    for x in worst_cases(alpha):
        assert error_of(method, np.float32(x)) <= alpha * (1 + 1e-3) + 1e-12


@pytest.mark.parametrize("alpha", [0.1, 0.03, 0.001])
def test_error_of_a_normal_vector_is_a_third_of_alpha(alpha):
    """Errors are uniform in a step of 2 h: h^2 / 3 each."""
    g = np.random.default_rng(1).standard_normal((200, 300)).astype("f4")
    assert error_of(rs.contrib.SparseDithering(alpha=alpha), g) == pytest.approx(
        alpha / 3, rel=0.05
    )


@pytest.mark.parametrize("alpha", [0.5, 0.1, 0.01])
def test_sum_of_levels_is_bounded(alpha):
    """sum k <= sqrt(n d / alpha) / 2 + n / 2, and some vector nearly reaches it."""
    shares = []
    for x in worst_cases(alpha):
        k = levels_of(x, alpha)
        n = np.count_nonzero(k)
        bound = np.sqrt(n * x.size / alpha) / 2 + n / 2
        assert k.sum() <= bound * (1 + 1e-9)
        shares.append(k.sum() / bound)
    assert max(shares) > 0.8


def entropy(p):
    p = np.asarray(p)[np.asarray(p) > 0]
    return -np.sum(p * np.log2(p))


def enumerated(alpha, shares):
    """Returns bits per element of the paper's numbering: positions, signs, bounded levels."""
    return max(
        entropy([t, 1 - t]) + t + s * entropy([t / s, 1 - t / s])
        for t, s in ((t, np.sqrt(t / alpha) / 2 + t / 2) for t in shares)
    )


def test_bits_compared_with_the_paper():
    """At alpha = 0.1: 3.33 by numbering (paper: about 3.35), 3.58 here, 2.88 of them used."""
    alpha, size = 0.1, 300_000
    assert enumerated(alpha, np.linspace(0.5, 1, 1000)) == pytest.approx(3.35, abs=0.03)
    spec = TensorSpec("w", (size,))
    program = ExchangeSchedule(make_buckets([(spec, rs.contrib.SparseDithering(alpha=alpha))], 2))
    assert 8 * program.bytes_per_step(2) / size == pytest.approx(3.58, abs=0.005)
    # Low bit, a one, and zeros: the part that a normal vector fills.
    g = np.random.default_rng(2).standard_normal(size)
    k = levels_of(g, alpha)
    filled = 2 + (k.sum() - np.count_nonzero(k) / 2) / size
    assert filled == pytest.approx(2.88, abs=0.02)
    least = entropy(np.unique(np.sign(g) * k, return_counts=True)[1] / size)
    assert least == pytest.approx(2.73, abs=0.02)
    assert np.log2(1 / alpha) / 2 == pytest.approx(1.66, abs=0.005)  # of any code, for any vector


@every_alpha
def test_low_bits_give_the_shortest_bound(alpha):
    lengths = [r + 1 + 1 / (2**r * np.sqrt(alpha)) for r in range(1, 14)]
    method = rs.contrib.SparseDithering(alpha=alpha)
    assert lengths[method.rice - 1] == pytest.approx(min(lengths))
    assert method.describe(TensorSpec("w", (1000, 1000))).startswith(f"{min(lengths):.3g} bits")


@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1e6, 1e30])
def test_norms_neither_overflow_nor_underflow(magnitude):
    g = (magnitude * np.random.default_rng(3).standard_normal((20, 30))).astype("f4")
    assert error_of(rs.contrib.SparseDithering(), g) < 0.05


def test_denormal_gradients_stay_in_the_residual():
    g = np.full((20, 30), 1e-42, np.float32)
    step = run(rs.contrib.SparseDithering(), [g, g])
    assert step.finite and not np.array(step.totals[0][0]).any()


def test_more_frequent_sign_has_no_effect():
    g = np.abs(np.random.default_rng(4).standard_normal((30, 40))).astype("f4")
    first, second = (run(rs.contrib.SparseDithering(), [x]).totals[0][0] for x in (g, -g))
    np.testing.assert_array_equal(first, -second)


def test_residual_is_sent_later():
    """After t steps the totals are t times the gradient, up to one residual."""
    g, method = (
        np.random.default_rng(5).standard_normal((16, 16)).astype("f4"),
        rs.contrib.SparseDithering,
    )
    layout = BucketLayout((TensorSpec("w", g.shape),), 1)
    states, delivered = loopback.initial_states(method(alpha=0.9), layout), 0.0
    run_step = loopback.traced_step(method(alpha=0.9), layout)
    for number in range(30):
        step = run_step([[tf.constant(g)]], states, number)
        states, delivered = step.states, delivered + np.float64(step.totals[0][0])
    assert np.linalg.norm(delivered / 30 - g) < 0.2 * np.linalg.norm(g)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_groups_of_workers_sum_to_equal_bits(workers, monkeypatch):
    g = np.random.default_rng(8).standard_normal((9, 32))
    grads, method = [(i + 1) * g for i in range(workers)], rs.contrib.SparseDithering()
    expected = np.array(run(method, grads).totals[0][0])
    assert np.abs(expected).max() > 0
    monkeypatch.setattr("tf_redsync.contrib.optimal_compression.VALUES", 2 * g.size)
    np.testing.assert_array_equal(run(method, grads).totals[0][0], expected)


def test_malformed_code_is_detected():
    method, spec = rs.contrib.SparseDithering(), TensorSpec("w", (50,))
    message = np.array(run(method, [np.ones(50, np.float32)]).requests[0].message)
    assert method._decoded(tf.constant([message]), [50]).shape == [1, 50]
    message[-1] ^= 1
    with pytest.raises(tf.errors.InvalidArgumentError, match="invalid number of ones.*51"):
        method._decoded(tf.constant([message]), [spec.size])


def test_bucket_that_is_too_large():
    specs = tuple(TensorSpec(str(i), (2**15, 2**13), position=i) for i in range(4))
    assert all(rs.contrib.SparseDithering().refuses(s) is None for s in specs)
    exchange = rs.contrib.SparseDithering().exchange(
        [], {}, Context(BucketLayout(specs, 2), 0, tf.constant(0))
    )
    with pytest.raises(ValueError, match="Use a smaller `bucket_bytes`"):
        next(exchange)


@pytest.mark.parametrize("shape", [(), (0, 4), (1,)])
def test_scalars_and_empty_tensors(shape):
    step = run(rs.contrib.SparseDithering(), [np.full(shape, -2.0)] * 2)
    np.testing.assert_allclose(step.totals[0][0], np.full(shape, -4.0), rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3.4e38])
def test_nonfinite_values_skip_the_step(bad):
    """A norm that overflows float32 does as well."""
    g = np.ones((20, 30), np.float32)
    g[7] = bad
    assert not run(rs.contrib.SparseDithering(), [np.ones_like(g), g]).finite


def test_compressed_tensors():
    method = rs.contrib.SparseDithering()
    assert "rank 1" in method.refuses(TensorSpec("bias", (5000,)))
    assert "dense_below" in method.refuses(TensorSpec("w", (10, 10)))
    assert f"{2**31 - 1} bits" in method.refuses(TensorSpec("w", (2**15, 2**15)))
    assert method.refuses(TensorSpec("w", (100, 100))) is None


@pytest.mark.parametrize(
    ("name", "value"), [("alpha", 0.0), ("alpha", 1.0), ("alpha", "0.1"), ("dense_below", -1)]
)
def test_bad_input(name, value):
    with pytest.raises(ValueError, match=f"`{name}`.*Received: {name}={value!r}"):
        rs.contrib.SparseDithering(**{name: value})
