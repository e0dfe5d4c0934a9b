"""Natural compression, DoReFa, Quantized Frank-Wolfe: levels, means, variances, bits, bad input."""

import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from tests.loops import loop
from tf_redsync.exchange import loopback
from tf_redsync.exchange.layout import BucketLayout, TensorSpec, make_buckets
from tf_redsync.ops.quantized_format import code_bits
from tf_redsync.step.exchange_schedule import ExchangeSchedule

METHODS = (
    rs.contrib.NaturalCompression(),
    rs.contrib.DoReFa(bitwidth=2),
    rs.contrib.DoReFa(bitwidth=6),
    rs.contrib.QuantizedFW(levels=1, sum_levels=3),
    rs.contrib.QuantizedFW(),
)
every_method = pytest.mark.parametrize("method", METHODS, ids=str)
SAMPLES = 4000


def run(method, grads, number=0, position=0):
    """Runs one step of a layout of one tensor; `grads[worker]`."""
    layout = BucketLayout((TensorSpec("w", np.shape(grads[0]), position=position),), len(grads))
    inputs = [[tf.constant(g, tf.float32)] for g in grads]
    return loopback.run_step(method, layout, inputs, [{}] * len(grads), number)


def total_of(method, grads, number=0, position=0):
    step = run(method, grads, number, position)
    assert step.finite
    return np.array(step.totals[0][0])


def samples(seed=0):
    """Returns 32 normal elements, and a matrix that repeats them in rows, rounded independently."""
    row = np.random.default_rng(seed).standard_normal(32).astype("f4")
    return row, np.tile(row, (SAMPLES, 1))


def assert_unbiased(total, expected):
    """Asserts that the columns' means are within five of their standard deviations."""
    error = np.float64(total) - expected
    deviation = error.std(axis=0) / len(error) ** 0.5
    assert np.all(np.abs(error.mean(axis=0)) <= 5 * deviation + 1e-6)
    assert error.std() > 0.01  # rounding was not trivial


@loop("workers", [1, 3])
@every_method
def test_totals_are_unbiased(method, workers):
    row, rows = samples()
    assert_unbiased(total_of(method, [rows] * workers), workers * np.float64(row))


@pytest.mark.parametrize("method", METHODS[:3], ids=str)
def test_rounding_errors_of_workers_are_independent(method):
    """Independent errors add up by variance, equal errors by deviation."""
    _, rows = samples(1)
    one = np.square(total_of(method, [rows]) - rows).sum()
    many = np.square(total_of(method, [rows] * 4) - 4 * rows).sum()
    assert many / one == pytest.approx(4, rel=0.05)


@every_method
def test_random_numbers_depend_only_on_seed_step_and_tensor(method):
    _, rows = samples(2)
    rows = rows[:20]

    def rounding(number=0, position=0, flip=1.0, **options):
        changed = type(method)(**{**vars(method), **options})
        return np.abs(total_of(changed, [flip * rows] * 2, number, position))

    first = rounding()
    np.testing.assert_array_equal(rounding(), first)
    for other in (rounding(seed=1), rounding(number=1), rounding(position=1)):
        assert 0.1 < np.mean(other != first) <= 1.0
    if not isinstance(method, rs.contrib.DoReFa):  # levels go from -c to c, so a sign is data
        np.testing.assert_array_equal(rounding(flip=-2.0), 2 * first)


# ------------------------------------------------------------------------------------ natural


def test_natural_rounds_to_an_adjacent_power_of_two():
    g = np.random.default_rng(3).standard_t(2, (50, 60)).astype("f4")
    g[0, :4] = 0.0, -0.5, 4.0, -1.5
    total = total_of(rs.contrib.NaturalCompression(), [g])
    np.testing.assert_array_equal(total[0, :3], g[0, :3])  # these are exact
    assert total[0, 3] in (-1, -2)
    sent, true = np.abs(total[g != 0]), np.abs(g[g != 0])
    assert np.all(np.frexp(sent)[0] == 0.5)  # powers of two
    assert np.all((sent <= 2 * true) & (true <= 2 * sent) & (np.sign(total) == np.sign(g))[g != 0])


@loop(("mantissa", "variance"), [(4 / 3, 1 / 8), (1.0, 0.0), (1.5, 1 / 9)])
@loop("exponent", [-100, 0, 100])
def test_variance_of_natural_is_at_most_an_eighth(mantissa, exponent, variance):
    """(t - 1) (2 - t) / t^2 has its maximum of 1/8 at t = 4/3."""
    t = np.float32(mantissa * 2.0**exponent)
    total = total_of(rs.contrib.NaturalCompression(), [np.full((100, 300), t)])
    found = np.square(np.float64(total) / np.float64(t) - 1).mean()
    assert found == pytest.approx(variance, rel=0.04, abs=1e-9)


def test_natural_rounding_to_infinity_skips_the_step():
    g = np.ones((10, 10), np.float32)
    g[0] = 3.4e38  # 2^128 with a probability of 0.998
    assert not run(rs.contrib.NaturalCompression(), [g, g]).finite
    g[0] = 2.0**127
    assert total_of(rs.contrib.NaturalCompression(), [g])[0, 0] == 2.0**127


# ------------------------------------------------------------------------------------- DoReFa


@pytest.mark.parametrize("bitwidth", [1, 2, 6])
def test_levels_of_dorefa(bitwidth):
    """2^k equidistant levels from -c to c, without 0."""
    g = np.random.default_rng(4).standard_normal((80, 90)).astype("f4")
    g[:5] = 0.0
    c = np.abs(g).max()
    total = total_of(rs.contrib.DoReFa(bitwidth=bitwidth), [g])
    levels = c * np.linspace(-1, 1, 2**bitwidth)
    nearest = np.abs(total[..., np.newaxis] - levels).min(axis=-1)
    assert nearest.max() <= 1e-6 * c and np.abs(total).min() > 0
    step = levels[1] - levels[0]
    assert np.abs(total - g).max() <= step * (1 + 1e-5)  # one of the two adjacent levels
    assert np.square(total - g).mean() < step**2 / 4


def test_each_tensor_has_its_own_maximum():
    specs = (TensorSpec("a", (20, 20)), TensorSpec("b", (3, 7), position=1))
    grads = [[tf.fill(s.shape, value) for s, value in zip(specs, (1e-3, -5.0), strict=True)]]
    step = loopback.run_step(rs.contrib.DoReFa(bitwidth=4), BucketLayout(specs, 1), grads, [{}], 0)
    for total, g in zip(step.totals[0], grads[0], strict=True):
        np.testing.assert_allclose(total, g, rtol=1e-6)  # the largest elements are levels


# ------------------------------------------------------------------------------ Quantized FW


@pytest.mark.parametrize(("levels", "sum_levels"), [(1, 1), (4, 1), (7, 7)])
def test_variance_of_both_roundings(levels, sum_levels):
    """At most a quarter of a squared step, for all workers but one and for the sum."""
    workers, (_, rows) = 4, samples(5)
    method = rs.contrib.QuantizedFW(levels=levels, sum_levels=sum_levels)
    total = total_of(method, [rows] * workers)
    c, top = np.abs(rows).max(), np.abs(total).max()
    bound = ((workers - 1) * (c / levels) ** 2 + (top / sum_levels) ** 2) / 4
    assert 0.2 * bound < np.square(total - workers * rows).mean() < bound


def test_sum_has_the_given_number_of_levels():
    """A block of each worker, and levels of its largest sum."""
    g = np.random.default_rng(6).standard_normal((40, 50)).astype("f4")
    total = total_of(rs.contrib.QuantizedFW(levels=2, sum_levels=5), [g, 2 * g])
    for block in total.reshape(2, -1):
        parts = 5 * np.abs(block) / np.abs(block).max()
        np.testing.assert_allclose(parts, np.round(parts), atol=1e-5)
        assert len(np.unique(np.round(parts))) == 6


def test_code_length_matches_the_paper():
    """z = ceil(log2(s + 1)) + 1: a sign and one of s + 1 interval ends."""
    for s in (1, 2, 3, 4, 7, 8, 100, 127, 128, 32767):
        assert code_bits("stochastic", s) == np.ceil(np.log2(s + 1)) + 1


# ------------------------------------------------------------------------------- bits, input


def test_bits_per_element():
    spec, workers = TensorSpec("w", (256, 256)), 8
    n = spec.size

    def bits(method):
        return 8 * ExchangeSchedule(make_buckets([(spec, method)], workers)).bytes_per_step(workers)

    assert bits(rs.contrib.NaturalCompression()) == 7 * (9 * n + 32)
    assert bits(rs.contrib.DoReFa(bitwidth=6)) == 7 * (6 * n + 64)
    # Two phases: each 7 of 8 blocks of 4 bits, or of 8 bits in the second phase.
    assert bits(rs.contrib.QuantizedFW()) == 7 / 8 * 8 * n + 2 * 7 * 64
    assert bits(rs.contrib.QuantizedFW(sum_levels=127)) == 7 / 8 * 12 * n + 2 * 7 * 64


@loop("bad", [np.nan, np.inf, -np.inf])
@every_method
def test_nonfinite_value_skips_the_step(method, bad):
    g = np.ones((20, 30), np.float32)
    g[7, 7] = bad
    assert not run(method, [np.ones_like(g), g]).finite


@loop("shape", [(), (0, 4), (1,)])
@every_method
def test_scalars_and_empty_tensors(method, shape):
    total = total_of(method, [np.full(shape, 2.0)] * 2)
    np.testing.assert_array_equal(total, np.full(shape, 4.0))


def test_compressed_tensors():
    for method in METHODS:
        assert "rank 1" in method.refuses(TensorSpec("bias", (5000,)))
        assert "dense_below" in method.refuses(TensorSpec("w", (10, 10)))
        assert method.refuses(TensorSpec("w", (100, 100))) is None
        assert method.dense() == rs.Dense() and not method.traits.conserves


@loop(
    ("cls", "name", "value"),
    [
        (rs.contrib.NaturalCompression, "seed", -1),
        (rs.contrib.NaturalCompression, "dense_below", 0.5),
        (rs.contrib.DoReFa, "bitwidth", 0),
        (rs.contrib.DoReFa, "bitwidth", 17),
        (rs.contrib.QuantizedFW, "levels", 0),
        (rs.contrib.QuantizedFW, "levels", 32768),
        (rs.contrib.QuantizedFW, "sum_levels", 0),
        (rs.contrib.QuantizedFW, "sum_levels", 32768),
        (rs.contrib.QuantizedFW, "seed", 1.5),
    ],
)
def test_bad_input(cls, name, value):
    with pytest.raises(ValueError, match=f"`{name}`.*Received: {name}={value!r}"):
        cls(**{name: value})
