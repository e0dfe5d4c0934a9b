"""16-bit sums: float32 addition, underflow and overflow, wrapped methods, bytes."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from tests.deep import DEEP
from tests.loops import loop
from tf_redsync import config
from tf_redsync.exchange import loopback
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.driver import drive
from tf_redsync.exchange.layout import BucketLayout, TensorSpec, make_buckets
from tf_redsync.exchange.requests import AllReduce
from tf_redsync.exchange.traffic import DryRun
from tf_redsync.step.exchange_schedule import ExchangeSchedule

ROUNDED = (
    rs.RandomK(density=0.3),
    rs.RandomBlock(density=0.3),
    rs.PowerSGD(rank=2, min_compression_rate=0),
    rs.ACPSGD(rank=2, min_compression_rate=0),
)


DTYPES = ("float16", "bfloat16")


def run(method, grads, steps=1, shape=None):
    """Returns the sum of all totals and the last step; `grads[worker]` is equal in every step."""
    spec = TensorSpec("w", np.shape(grads[0]))
    layout = BucketLayout((spec,), len(grads))
    inputs = [[tf.constant(g, tf.float32)] for g in grads]
    states, delivered = loopback.initial_states(method, layout), 0.0
    one = functools.partial(loopback.run_step, method, layout)
    if steps > 30:  # tracing takes as long as this many steps
        one = loopback.traced_step(method, layout)
    for number in range(steps):
        step = one(inputs, states, number)
        states = step.states
        delivered = delivered + np.array(step.totals[0][0])
    return delivered, step


def test_sums_are_accumulated_in_float32():
    """2048 + 1 is 2048 in float16: with seven ones, one rounding error remains instead of seven."""
    grads = [np.float32([2048.0])] + [np.float32([1.0])] * 7
    assert run(rs.HalfPrecision(), grads)[0] == 2056  # 2055, rounded
    assert run(rs.HalfPrecision(error_feedback=False), grads)[0] == 2048
    assert run(rs.HalfPrecision(), grads, steps=4)[0] == 4 * 2055  # the residual is delivered later


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_values_are_rounded_to_nearest(dtype):
    g = np.random.default_rng(0).standard_normal((30, 41)).astype("f4")
    digits = {"float16": 11, "bfloat16": 8}[dtype]
    for feedback in (True, False):
        total, _ = run(rs.HalfPrecision(dtype=dtype, error_feedback=feedback), [g])
        relative = np.abs(total - g) / np.abs(g)
        assert 0.5 * 2.0**-digits < relative.max() <= 2.0**-digits


def test_underflow_stays_in_the_residual():
    grads = [np.full(5, 1e-9, np.float32)] * 2  # the smallest float16 is 6e-8
    delivered, step = run(rs.HalfPrecision(), grads, steps=100)
    np.testing.assert_allclose(delivered, 2e-7, atol=1.3e-7)
    left = sum(np.float64(s["residual"][0]) for s in step.states)
    np.testing.assert_allclose(delivered + left, 2e-7, rtol=1e-4)
    assert not run(rs.HalfPrecision(error_feedback=False), grads, steps=100)[0].any()


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("grads", [[7e4, 0.0], [4e4, 4e4]])
def test_overflow_skips_the_step(grads, feedback):
    """A value above 65504, or the sum of two values that are below."""
    grads = [np.float32([1.0, g, 1.0]) for g in grads]
    assert not run(rs.HalfPrecision(error_feedback=feedback), grads)[1].finite
    assert run(rs.HalfPrecision(dtype="bfloat16", error_feedback=feedback), grads)[1].finite


def test_random_block_keeps_its_rounding_errors():
    g = np.random.default_rng(1).standard_normal((40, 30)).astype("f4")
    exact, _ = run(rs.RandomBlock(density=0.25), [g] * 3)
    total, step = run(rs.HalfPrecision(method=rs.RandomBlock(density=0.25)), [g] * 3)
    np.testing.assert_array_equal(total != 0, exact != 0)  # the same elements
    np.testing.assert_allclose(total, exact, rtol=2.0**-10)  # rounded twice
    kept = np.abs(step.states[1]["residual"][0].numpy()[exact != 0])
    assert 0 < kept.max() < 3 * np.abs(g).max() * 2.0**-11


@pytest.mark.parametrize("method", ROUNDED, ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_wrapped_methods_send_half_of_the_bytes(method, dtype):
    """The totals are those of the method, up to rounding."""
    grads = [np.random.default_rng(i).standard_normal((64, 96)).astype("f4") for i in range(2)]
    plain, plain_step = run(method, grads, steps=2)
    assert all(isinstance(r, AllReduce) for r in plain_step.requests)
    total, step = run(rs.HalfPrecision(method=method, dtype=dtype), grads, steps=2)
    tolerance = {"float16": 2e-3, "bfloat16": 2e-2}[dtype]
    np.testing.assert_allclose(total, plain, atol=tolerance * np.abs(plain).max())
    # K = 2: a row to the other worker, a message to the other worker
    headers = 4 * 1.5 * len(step.requests)
    assert step.bytes_sent == pytest.approx(plain_step.bytes_sent / 2 + headers, abs=8)


@pytest.mark.parametrize("method", ROUNDED, ids=lambda m: type(m).__name__)
def test_traced_steps(method):
    """The length of ACP-SGD's vector then depends on the step."""
    layout = BucketLayout((TensorSpec("w", (12, 10)),), 3)
    wrapped = rs.HalfPrecision(method=method)
    grads, state = [tf.random.stateless_normal([12, 10], [1, 2])], wrapped.init(layout)

    @tf.function
    def step(number):
        outcome = drive([wrapped.exchange(grads, state, Context(layout, 0, number))], DryRun(3))
        return outcome.results[0]

    for number in (0, 1):
        totals, new = step(tf.constant(number, tf.int64))
        ctx = Context(layout, 0, tf.constant(number, tf.int64))
        eager, eager_new = drive([wrapped.exchange(grads, state, ctx)], DryRun(3)).results[0]
        assert totals[0].shape == (12, 10)
        np.testing.assert_allclose(totals[0], eager[0], atol=1e-3)
        np.testing.assert_allclose(new["residual"][0], eager_new["residual"][0], atol=1e-3)


@pytest.mark.parametrize("workers", [2, 5])
def test_bytes_are_half_of_dense(workers):
    spec = TensorSpec("w", (100, 200))

    def sent(method):
        program = ExchangeSchedule(make_buckets([(spec, method)], workers))
        return program.bytes_per_step(workers)

    dense = sent(rs.Dense())
    assert sent(rs.HalfPrecision(error_feedback=False)) == dense / 2
    assert sent(rs.HalfPrecision()) == dense / 2 + 2 * 4 * (workers - 1)  # two flags


SELECT = (
    rs.TopK(density=0.2),
    rs.TopK(density=0.2, scope="model"),
    rs.RedSync(density=0.2, dense_below=0, selection="threshold"),
    rs.RedSync(density=0.2, dense_below=0, warm_up=rs.ExponentialWarmUp(2)),
    rs.DGC(density=0.2, dense_below=0, momentum=0.0),
    rs.contrib.SIDCo(density=0.2, dense_below=0),
    rs.GMC(density=0.2, dense_below=0, momentum=0.0),
    rs.contrib.GMCPlus(density=0.2, dense_below=0, momentum=0.0, selection="random_block"),
    rs.contrib.FixedThreshold(threshold=0.1, density=0.2, dense_below=0),
    rs.contrib.SparDL(density=0.2, dense_below=0),
    rs.contrib.CompAMS(density=0.2, dense_below=0),
    rs.contrib.MSTopK(density=0.2, dense_below=0),
    rs.LocalSGD(steps=3),
    rs.DiLoCo(steps=3),
    rs.contrib.PostLocalSGD(start=2, steps=3),
)


def methods_and_dtypes():
    """Returns all methods with the first dtype and one with the other; with `--deep` all pairs."""
    pairs = [(method, dtype) for dtype in DTYPES for method in SELECT]
    return pairs if DEEP else pairs[: len(SELECT) + 1]


@loop("method, dtype", methods_and_dtypes())
def test_selected_values_are_rounded_with_error_feedback(method, dtype):
    specs = (TensorSpec("a", (31, 17), position=0), TensorSpec("b", (9, 9), position=1))
    layout, wrapped = BucketLayout(specs, 3), rs.HalfPrecision(method=method, dtype=dtype)
    draw = np.random.default_rng(0).standard_normal
    states = loopback.initial_states(wrapped, layout)
    plain = loopback.initial_states(method, layout)
    kept, rounded = [np.zeros(s.shape) for s in specs], 0.0
    for number in range(5):
        grads = [[tf.constant(draw(s.shape), tf.float32) for s in specs] for _ in range(3)]
        step = loopback.run_step(wrapped, layout, grads, states, number)
        sent = loopback.run_step(method, layout, grads, plain, number)
        plain = sent.states
        assert step.finite and (number < 4 or step.bytes_sent < 0.8 * sent.bytes_sent)
        states = step.states
        for i, total in enumerate(step.totals[0]):
            residual = sum(np.float64(s["residual"][i]) for s in states)
            put_in = kept[i] + sum(np.float64(g[i]) for g in grads)
            np.testing.assert_allclose(total + residual, put_in, rtol=0, atol=1e-5)
            kept[i] = residual
        exact = [np.float64(t) for t in sent.totals[0]]
        rounded += sum(np.abs(t - e).max() for t, e in zip(step.totals[0], exact, strict=True))
    assert rounded > 0  # the method without the wrapper sends other numbers


def test_float16_overflow_skips_the_step():
    spec = TensorSpec("a", (20, 20))
    method, layout = rs.HalfPrecision(method=rs.TopK(density=0.1)), BucketLayout((spec,), 2)
    gradient = np.ones((20, 20), np.float32)
    gradient[3, 3] = 70000.0
    grads = [[tf.constant(gradient)], [tf.ones([20, 20])]]
    step = loopback.run_step(method, layout, grads, loopback.initial_states(method, layout), 0)
    assert not step.finite


def test_methods_with_coded_words_are_rejected():
    takes = {type(m).__name__ for m in (*ROUNDED, *SELECT, rs.Dense())}
    for name, cls in config.registered().items():
        if not issubclass(cls, rs.Method) or name in takes:
            continue
        if not cls().traits.rounds_values:
            with pytest.raises(ValueError, match="`method` must be None.*Received: method="):
                rs.HalfPrecision(method=cls())


def test_traits_are_those_of_the_wrapped_method():
    wrapped = rs.HalfPrecision(method=rs.PowerSGD(rank=2), dtype="bfloat16")
    bias, matrix = TensorSpec("b", (9,)), TensorSpec("w", (90, 90))
    assert wrapped.refuses(bias) == rs.PowerSGD().refuses(bias) and wrapped.dense() == rs.Dense()
    assert wrapped.describe(matrix) == "rank 2 of 90 x 90 in bfloat16"
    assert wrapped.traits.state_kinds == rs.PowerSGD().traits.state_kinds
    assert wrapped.traits.conserves
    assert not rs.HalfPrecision(method=rs.PowerSGD(), error_feedback=False).traits.conserves
    assert rs.HalfPrecision().refuses(bias) is None and rs.HalfPrecision().traits.conserves


@pytest.mark.parametrize(
    ("name", "value"),
    [("dtype", "float32"), ("dtype", tf.float16), ("error_feedback", 1), ("method", "dense")],
)
def test_bad_input(name, value):
    with pytest.raises(ValueError, match=f"`{name}`.*Received: {name}="):
        rs.HalfPrecision(**{name: value})
