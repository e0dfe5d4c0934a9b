"""Spherical compression: probabilities, codebook, selection, bits, bad input."""

import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from tests.loops import loop
from tf_redsync.contrib.optimal_compression import FACTORS, index_cost
from tf_redsync.exchange import loopback
from tf_redsync.exchange.layout import BucketLayout, TensorSpec, make_buckets
from tf_redsync.step.exchange_schedule import ExchangeSchedule

ZERO = tf.constant(0, tf.int64)
# Alpha, d, b, bits per element in METHODS: where the codebook is feasible.
FEASIBLE = (
    (0.9, 16, 6, 0.20),
    (0.9, 32, 8, 0.15),
    (0.9, 64, 11, 0.12),
    (0.5, 16, 13, 0.65),
)


def layout_of(*shapes, workers=1):
    specs = tuple(TensorSpec(f"w{i}", s, position=i) for i, s in enumerate(shapes))
    return BucketLayout(specs, workers)


def run(method, grads, number=0):
    layout = layout_of(np.shape(grads[0]), workers=len(grads))
    inputs = [[tf.constant(g, tf.float32)] for g in grads]
    states = loopback.initial_states(method, layout)
    return loopback.run_step(method, layout, inputs, states, number)


def unit_rows(count, d, seed=0):
    x = np.random.default_rng(seed).standard_normal((count, d))
    return np.float32(x / np.linalg.norm(x, axis=1, keepdims=True))


def test_index_cost_matches_the_incomplete_beta_function():
    betainc = pytest.importorskip("scipy.special", reason="only SciPy has the function").betainc
    for alpha in (0.01, 0.5, 0.9, 0.99):
        for d in (2, 3, 16, 32, 64, 100):
            expected = -np.log2(betainc((d - 1) / 2, 0.5, alpha) / 2)
            assert index_cost(alpha, d) == pytest.approx(expected, rel=1e-6)


def test_index_costs_match_the_paper():
    """Bits per element; the limit is log2(1 / alpha) / 2."""
    for alpha, expected in ((0.5, (0.65, 0.59, 0.55)), (0.9, (0.20, 0.15, 0.12))):
        found = [index_cost(alpha, d) / d for d in (16, 32, 64)]
        np.testing.assert_allclose(found, expected, atol=0.005)
        assert index_cost(alpha, 5000) / 5000 == pytest.approx(np.log2(1 / alpha) / 2, rel=0.05)


@pytest.mark.parametrize(("alpha", "d", "index_bits", "cost"), FEASIBLE)
def test_measured_index_bits(alpha, d, index_bits, cost):
    """The first near vector's index is geometric with mean 1 / q: Rice's code and entropy."""
    method = rs.contrib.SphericalCompression(alpha=alpha, block_size=d, index_bits=index_bits)
    rows, q = unit_rows(1000, d), 2.0 ** -index_cost(alpha, d)
    codebook = method.codebook(layout_of((d,)), ZERO).numpy()
    near = rows @ codebook.T >= np.sqrt(1 - alpha)
    found = near.any(axis=1)
    assert np.mean(near) == pytest.approx(q, rel=0.1)
    assert np.mean(~found) <= 2 * (1 - q) ** 2**index_bits + 0.01
    first = np.argmax(near[found], axis=1)  # from 0
    # Log2 of an exponential variable is on average 0.83 bits below that of its mean.
    assert np.log2(first + 0.5).mean() == pytest.approx(np.log2(1 / q) - 0.83, abs=0.35)
    rice = max(0, round(np.log2(np.log(2) / q)))
    code = np.mean((first >> rice) + 1 + rice)
    assert np.log2(1 / q) + 1.2 < code < np.log2(1 / q) + 1.8
    assert index_cost(alpha, d) / d == pytest.approx(cost, abs=0.005)
    chosen, _ = method.search(tf.constant(rows[found]), tf.constant(codebook))
    assert np.mean(chosen.numpy() == first) > 0.999  # rounding of a product may decide


def test_directions_are_uniform_and_differ_by_step():
    method = rs.contrib.SphericalCompression(block_size=16, index_bits=13)
    layout = layout_of((100, 100))
    codebook = method.codebook(layout, ZERO).numpy()
    assert codebook.shape == (8192, 16) and codebook.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(codebook, axis=1), 1, rtol=1e-6)
    assert np.abs(codebook.mean(axis=0)).max() < 5 / (16 * 8192) ** 0.5
    np.testing.assert_allclose(codebook.T @ codebook / 8192, np.eye(16) / 16, atol=0.004)
    # The fourth moment of an element of a uniform direction is 3 / (d (d + 2)).
    assert (codebook**4).mean() == pytest.approx(3 / (16 * 18), rel=0.03)
    np.testing.assert_array_equal(method.codebook(layout, ZERO), codebook)
    other = rs.contrib.SphericalCompression(block_size=16, index_bits=13, seed=1)
    for book in (method.codebook(layout, ZERO + 1), other.codebook(layout, ZERO)):
        assert np.abs(book - codebook).max() > 0.1


@pytest.mark.parametrize("index_bits", [4, 5, 9])
def test_near_vectors_leave_an_error_of_at_most_alpha(index_bits):
    """A block without a near vector gets its nearest one at the best factor."""
    method = rs.contrib.SphericalCompression(index_bits=index_bits)
    rows = unit_rows(3000, 16, seed=2)
    codebook = method.codebook(layout_of((16,)), ZERO)
    index, factors = (t.numpy() for t in method.search(tf.constant(rows), codebook))
    vectors = codebook.numpy()[index]
    errors = np.square(rows - factors[:, np.newaxis] * vectors).sum(axis=1)
    near = (rows @ codebook.numpy().T).max(axis=1) >= np.sqrt(0.1) + 1e-6
    assert errors[near].max() <= 0.9 + 1e-5
    np.testing.assert_allclose(errors, 1 - np.square(factors), atol=1e-5)
    assert (~near).any() == (index_bits < 9) and errors.max() < 1
    best = (rows @ codebook.numpy().T).max(axis=1)
    np.testing.assert_allclose(factors[~near], best[~near], rtol=1e-5)


def test_nearest_vector_delivers_more():
    """Of the squared norm of normal blocks, at equal bits."""
    rows, taken = tf.constant(unit_rows(4000, 16, seed=6)), []
    for nearest in (False, True):
        method = rs.contrib.SphericalCompression(nearest=nearest)
        codebook = method.codebook(layout_of((16,)), ZERO)
        index, factors = method.search(rows, codebook)
        taken.append(np.square(factors).mean())
    assert np.array_equal(index, np.argmax(rows.numpy() @ codebook.numpy().T, axis=1))
    np.testing.assert_allclose(taken, [0.187, 0.261], atol=0.015)


def test_chunked_search_gives_equal_results(monkeypatch):
    method, rows = rs.contrib.SphericalCompression(), tf.constant(unit_rows(101, 16))
    codebook = method.codebook(layout_of((16,)), ZERO)
    whole = method.search(rows, codebook)
    monkeypatch.setattr("tf_redsync.contrib.optimal_compression.PRODUCTS", 7 * 32)
    for found, expected in zip(method.search(rows, codebook), whole, strict=True):
        assert found.shape == [101]
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_rounded_factors_cost_little():
    """31 factors, four per factor of two: at most 9 % off, whose square is lost."""
    assert FACTORS[0] == 0 and FACTORS[-1] == 1 and len(FACTORS) == 32
    np.testing.assert_allclose(FACTORS[2:] / FACTORS[1:-1], 2**0.25, rtol=1e-6)
    method = rs.contrib.SphericalCompression()
    g = np.random.default_rng(3).standard_normal((500, 64)).astype("f4")
    step = run(method, [g])
    left = np.square(np.float64(step.states[0]["residual"][0])).sum()
    rows = tf.constant(g.reshape(-1, 16))
    _, factors = method.search(rows, method.codebook(layout_of(g.shape), ZERO))
    taken = np.square(np.float64(factors)).sum()
    total = np.square(np.float64(g)).sum()
    assert 0.1 * total < taken < 0.25 * total
    assert taken * 0.99 < total - left <= taken
    sent = np.array(step.totals[0][0])
    np.testing.assert_allclose(sent + np.array(step.states[0]["residual"][0]), g, atol=1e-6)


def test_residual_is_sent_later():
    """One step's codebook misses many directions; those of all steps miss none."""
    g = np.random.default_rng(4).standard_normal((8, 20)).astype("f4")
    method = rs.contrib.SphericalCompression()
    layout = layout_of(g.shape)
    states, delivered = loopback.initial_states(method, layout), 0.0
    run_step = loopback.traced_step(method, layout)
    for number in range(150):
        step = run_step([[tf.constant(g)]], states, number)
        states, delivered = step.states, delivered + np.float64(step.totals[0][0])
    assert np.linalg.norm(delivered / 150 - g) < 0.15 * np.linalg.norm(g)
    assert method.traits.waiting_steps == pytest.approx(10)


def test_bits_per_element():
    spec = TensorSpec("w", (256, 256))

    def bits(**options):
        program = ExchangeSchedule(
            make_buckets([(spec, rs.contrib.SphericalCompression(**options))], 2)
        )
        return 8 * program.bytes_per_step(2) / spec.size

    assert bits() == pytest.approx((5 + 5) / 16, rel=2e-3)
    assert bits(block_size=64, index_bits=10) == pytest.approx((10 + 5) / 64, rel=5e-3)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1e6, 1e30])
def test_norms_neither_overflow_nor_underflow(magnitude):
    g = (magnitude * np.random.default_rng(5).standard_normal((20, 32))).astype("f4")
    total = np.array(run(rs.contrib.SphericalCompression(), [g]).totals[0][0])
    assert 0.25 < np.corrcoef(total.ravel(), g.ravel())[0, 1] < 0.6


@pytest.mark.parametrize("shape", [(), (0, 4), (1,), (17,)])
def test_scalars_and_empty_tensors(shape):
    step = run(rs.contrib.SphericalCompression(), [np.full(shape, 2.0)] * 2)
    assert step.finite
    kept = sum(np.array(s["residual"][0]) for s in step.states)
    np.testing.assert_allclose(step.totals[0][0] + kept, np.full(shape, 4.0), rtol=1e-6)


def test_zeros_are_exact():
    step = run(rs.contrib.SphericalCompression(), [np.zeros((40, 40))] * 2)
    assert not np.array(step.totals[0][0]).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_value_skips_the_step(bad):
    g = np.ones((20, 30), np.float32)
    g[7, 7] = bad
    assert not run(rs.contrib.SphericalCompression(), [np.ones_like(g), g]).finite


@loop(
    ("options", "name"),
    [
        ({"alpha": 0.0}, "alpha"),
        ({"alpha": 1.0}, "alpha"),
        ({"block_size": 1}, "block_size"),
        ({"block_size": 10**9}, "block_size"),
        ({"index_bits": 0}, "index_bits"),
        ({"index_bits": 3}, "index_bits"),  # the index cost is 3.2 bits
        ({"index_bits": 17}, "index_bits"),
        ({"nearest": 1}, "nearest"),
        ({"seed": -1}, "seed"),
        ({"dense_below": -1}, "dense_below"),
    ],
)
def test_bad_input(options, name):
    with pytest.raises(ValueError, match=f"`{name}`.*Received: {name}={options[name]!r}"):
        rs.contrib.SphericalCompression(**options)


def test_unreachable_error_bound_raises():
    with pytest.raises(ValueError, match=r"at least 36 .* at most 16"):
        rs.contrib.SphericalCompression(alpha=0.5, block_size=64, index_bits=16)
