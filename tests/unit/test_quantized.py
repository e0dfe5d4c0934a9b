"""QSGD, TernGrad, 2-bit: unbiasedness, independent workers, thresholds, bits, bad input."""

import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from tests.loops import loop
from tf_redsync.exchange import loopback
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout, TensorSpec, make_buckets
from tf_redsync.methods.common.ternary_all_reduce import (
    digits_per_number,
    packed_digits,
    unpacked_digits,
)
from tf_redsync.step.exchange_schedule import ExchangeSchedule

STOCHASTIC = (
    rs.QSGD(levels=3, bucket_size=32),
    rs.QSGD(levels=2, bucket_size=None, norm="max"),
    rs.TernGrad(clip=None),
    rs.TernGrad(clip=None, shared_scaler=True),
)
every_stochastic = pytest.mark.parametrize("method", STOCHASTIC, ids=str)
SAMPLES = 4000


def total_of(method, grads, number=0, position=0):
    """Returns the total of one step and the states; `grads[worker]`."""
    spec = TensorSpec("w", np.shape(grads[0]), position=position)
    layout = BucketLayout((spec,), len(grads))
    inputs = [[tf.constant(g, tf.float32)] for g in grads]
    states = loopback.initial_states(method, layout)
    step = loopback.run_step(method, layout, inputs, states, number)
    assert step.finite
    return np.array(step.totals[0][0]), step.states


def samples(seed=0):
    """Returns 32 normal elements, and a matrix that repeats them in rows, rounded independently."""
    row = np.random.default_rng(seed).standard_normal(32).astype("f4")
    return row, np.tile(row, (SAMPLES, 1))


@every_stochastic
def test_codes_are_unbiased(method):
    row, rows = samples()
    total, _ = total_of(method, [rows] * 2)
    error = total - 2 * rows
    deviation = error.std(axis=0) / SAMPLES**0.5
    assert np.all(np.abs(error.mean(axis=0)) <= 4.5 * deviation + 1e-6 * np.abs(row))
    assert error.std() > 0.1  # rounding was not trivial


@every_stochastic
@pytest.mark.parametrize("workers", [2, 5])
def test_rounding_errors_of_workers_are_independent(method, workers):
    """Independent errors add up by variance, equal errors by deviation."""
    _, rows = samples(1)
    one, _ = total_of(method, [rows])
    many, _ = total_of(method, [rows] * workers)
    ratio = np.square(many - workers * rows).sum() / np.square(one - rows).sum()
    assert ratio == pytest.approx(workers, rel=0.05)


@pytest.mark.parametrize("levels", [1, 4, 20])
def test_variance_of_qsgd_is_bounded(levels):
    """The bound is min(d / s^2, sqrt(d) / s) times the squared norm."""
    row, rows = samples(2)
    total, _ = total_of(rs.QSGD(levels=levels, bucket_size=32), [rows])
    variance = np.square(total - rows).sum(axis=1).mean()
    bound = min(32 / levels**2, 32**0.5 / levels) * np.square(row).sum()
    assert 0.02 * bound < variance < bound


def test_random_numbers_depend_only_on_seed_step_and_tensor():
    _, rows = samples(3)
    rows = rows[:10]

    def rounding(seed=0, number=0, position=0, flip=1.0):
        method = rs.QSGD(levels=1, bucket_size=32, norm="max", seed=seed)
        total, _ = total_of(method, [flip * rows], number, position)
        return np.not_equal(total, 0)

    first = rounding()
    np.testing.assert_array_equal(rounding(), first)
    np.testing.assert_array_equal(rounding(flip=-2.0), first)  # same magnitudes, other data
    for other in (rounding(seed=1), rounding(number=1), rounding(position=1)):
        assert 0.1 < np.mean(other != first) < 0.9


def test_buckets_of_one_method_round_independently():
    row, rows = samples(4)
    program = ExchangeSchedule(
        make_buckets([(TensorSpec("w", (10, 32), position=i), STOCHASTIC[0]) for i in (0, 1)], 2, 1)
    )
    assert len(program.buckets) == 2
    step = tf.constant(3, tf.int64)
    streams = [
        STOCHASTIC[0].worker_stream(Context(b.layout, 0, step)).numpy() for b in program.buckets
    ]
    assert not np.array_equal(*streams)


def test_clipping_bounds_the_effect_of_outliers():
    g = np.random.default_rng(5).standard_normal((50, 40)).astype("f4")
    g[3, 3] = 1000.0
    limit = 2.5 * np.sqrt(np.square(g).mean())
    total, _ = total_of(rs.TernGrad(), [g])
    np.testing.assert_allclose(np.unique(np.abs(total)), [0.0, limit], rtol=1e-5)
    assert np.abs(total_of(rs.TernGrad(clip=None), [g])[0]).max() == 1000.0
    # Each worker clips by its own deviation, then all use the largest scaler.
    small = np.clip(g, -1, 1)
    total, _ = total_of(rs.TernGrad(shared_scaler=True), [g, small])
    votes = total / limit
    np.testing.assert_allclose(votes, np.round(votes), atol=1e-5)
    assert 1 <= np.round(np.abs(votes).max()) <= 2


def test_constant_tensor_is_exact():
    g = np.full((20, 30), -0.3, np.float32)
    for method in (rs.TernGrad(), rs.TernGrad(shared_scaler=True), rs.contrib.TwoBit()):
        np.testing.assert_allclose(total_of(method, [g, g])[0], 2 * g, rtol=1e-6)


@loop("workers", [1, 2, 3, 4, 5, 8, 17, 64, 1000])
def test_packed_digits_sum_without_carry(workers):
    rng = np.random.default_rng(workers)
    codes = rng.integers(-1, 2, (min(workers, 20), 101)).astype("f4")
    packed = [packed_digits(tf.constant(c), workers) for c in codes]
    assert packed[0].shape == [-(-101 // digits_per_number(workers))]
    found = unpacked_digits(tf.add_n(packed), 101, workers)
    np.testing.assert_array_equal(found, codes.sum(axis=0))
    # The largest sums, which all workers agree on, and their neighbors in the next digit.
    for signs in (np.ones(101), -np.ones(101), np.where(np.arange(101) % 2, 1.0, -1.0)):
        packed = packed_digits(tf.constant(signs, tf.float32), workers)
        found = unpacked_digits(workers * packed, 101, workers)
        np.testing.assert_array_equal(found, workers * signs)
        assert np.abs(workers * packed).max() <= 2**24


def test_shared_scalers_are_smaller_from_five_workers_on():
    spec = TensorSpec("w", (500, 1000))
    for workers in (2, 4, 5, 16):
        own, shared = (
            ExchangeSchedule(
                make_buckets([(spec, rs.TernGrad(shared_scaler=s))], workers)
            ).bytes_per_step(workers)
            for s in (False, True)
        )
        assert (shared < own) == (workers >= 5)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1e6, 1e30])
def test_norms_neither_overflow_nor_underflow(magnitude):
    g = (magnitude * np.random.default_rng(6).standard_normal((10, 64))).astype("f4")
    for method in (rs.QSGD(levels=64), rs.TernGrad(), rs.contrib.TwoBit()):
        total, _ = total_of(method, [g])
        assert np.corrcoef(total.ravel(), g.ravel())[0, 1] > 0.5
        assert 0.3 < np.abs(total).mean() / np.abs(g).mean() < 3


# ------------------------------------------------------------------------------------- 2-bit


def test_default_threshold_leaves_a_third_of_a_normal_gradient():
    """E min over codes: 1 - E[2 |z| - 1; |z| > 1] = 0.35 of the energy; 1 is nearly optimal."""
    g = np.random.default_rng(7).standard_normal((300, 400)).astype("f4")

    def left(threshold):
        _, states = total_of(rs.contrib.TwoBit(threshold=threshold), [g])
        return np.square(states[0]["residual"][0]).sum() / np.square(g).sum()

    assert left(1.0) == pytest.approx(0.350, abs=0.01)
    assert left(1.0) < min(left(c) for c in (0.5, 1.5, 2.5)) + 0.01
    assert left(100.0) < 1.0  # the largest element is always sent


def test_relative_thresholds_follow_the_gradient_but_absolute_ones_do_not():
    g = np.random.default_rng(8).standard_normal((30, 40)).astype("f4")
    total, _ = total_of(rs.contrib.TwoBit(), [g])
    np.testing.assert_allclose(
        total_of(rs.contrib.TwoBit(), [1e-5 * g])[0], 1e-5 * total, rtol=1e-5
    )
    absolute = rs.contrib.TwoBit(threshold=0.5, unit="absolute")
    np.testing.assert_array_equal(np.unique(np.abs(total_of(absolute, [g])[0])), [0.0, 0.5])
    total, states = total_of(absolute, [1e-5 * g])
    assert not total.any()
    np.testing.assert_array_equal(states[0]["residual"][0], np.float32(1e-5) * g)


def test_single_large_element_is_delivered():
    """The gradient is one element, far above the mean square, and is still delivered in full."""
    method, layout = rs.contrib.TwoBit(), BucketLayout((TensorSpec("w", (50,)),), 1)
    g = np.zeros(50, np.float32)
    g[7] = 1.0
    states, delivered = loopback.initial_states(method, layout), 0.0
    for number in range(60):
        step = loopback.run_step(method, layout, [[tf.constant(g)]], states, number)
        states, delivered = step.states, delivered + np.array(step.totals[0][0])
    assert delivered[7] > 60 - 8 and np.count_nonzero(delivered) == 1  # delayed by 50 ** 0.5 steps


@pytest.mark.parametrize(
    "method",
    [
        rs.QSGD(),
        rs.TernGrad(),
        rs.contrib.TwoBit(),
        rs.contrib.TwoBit(threshold=1.5, unit="absolute"),
    ],
    ids=str,
)
def test_descent_converges_with_unequal_workers(method):
    """The loss is the sum of 0.5 ||w||^2 / 3 + pull_i w, where the pulls sum to 0."""
    n, states, pulls = 64, None, (1.0, -0.5, -0.5)
    layout = BucketLayout((TensorSpec("w", (n,)),), 3)
    w, states = np.linspace(-1, 1, n), loopback.initial_states(method, layout)
    for number in range(150):
        grads = [[tf.constant(w / 3 + p, tf.float32)] for p in pulls]
        step = loopback.run_step(method, layout, grads, states, number)
        states, w = step.states, w - 0.05 * np.float64(step.totals[0][0])
    assert np.square(w).sum() < 0.08 * np.square(np.linspace(-1, 1, n)).sum()


# ------------------------------------------------------------------------------- bits, input


def test_bits_per_element():
    """4 bits and a norm for 512 elements; 2 bits; 6 sums in a float32 for 8 workers."""
    spec, workers = TensorSpec("w", (512, 768)), 8
    n = spec.size

    def bits(method):
        program = ExchangeSchedule(make_buckets([(spec, method)], workers))
        return 8 * program.bytes_per_step(workers) / (workers - 1)

    assert bits(rs.QSGD()) == 4 * n + 32 * n / 512 + 32
    assert bits(rs.QSGD(levels=127, bucket_size=None)) == 8 * n + 64
    assert bits(rs.TernGrad()) == bits(rs.contrib.TwoBit()) == 2 * n + 64
    shared = 64 + 2 / workers * 32 * (n / 6)
    assert bits(rs.TernGrad(shared_scaler=True)) == pytest.approx(shared)


def test_description_of_buckets():
    spec = TensorSpec("w", (100, 100))
    assert rs.QSGD().describe(spec) == "4 bits, buckets of 512"
    assert rs.QSGD(bucket_size=None).describe(spec) == "4 bits, one norm"


def test_compressed_tensors():
    for method in (rs.QSGD(), rs.TernGrad(), rs.contrib.TwoBit()):
        assert "rank 1" in method.refuses(TensorSpec("bias", (5000,)))
        assert "dense_below" in method.refuses(TensorSpec("w", (10, 10)))
        assert method.refuses(TensorSpec("w", (100, 100))) is None
        assert method.dense() == rs.Dense()
    last = TensorSpec("last", (100, 100), output_layer=True)
    assert rs.TernGrad().refuses(last) == "output layer"
    assert rs.TernGrad(output_layer=True).refuses(last) is None
    assert rs.QSGD().refuses(last) is None


@loop(
    ("cls", "name", "value"),
    [
        (rs.QSGD, "levels", 0),
        (rs.QSGD, "levels", 32768),
        (rs.QSGD, "bucket_size", 31),
        (rs.QSGD, "bucket_size", 33),
        (rs.QSGD, "norm", "l1"),
        (rs.QSGD, "seed", -1),
        (rs.TernGrad, "clip", 0.0),
        (rs.TernGrad, "shared_scaler", 1),
        (rs.TernGrad, "output_layer", "no"),
        (rs.TernGrad, "seed", 1.5),
        (rs.contrib.TwoBit, "threshold", 0.0),
        (rs.contrib.TwoBit, "unit", "sigma"),
        (rs.contrib.TwoBit, "dense_below", -1),
    ],
)
def test_bad_input(cls, name, value):
    with pytest.raises(ValueError, match=f"`{name}`.*Received: {name}={value!r}"):
        cls(**{name: value})
