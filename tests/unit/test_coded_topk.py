"""CodedTopK: bits against entropy, energy of a message, residuals, bad arguments."""

import dataclasses
import math

import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from tests.loops import loop
from tf_redsync import codings
from tf_redsync.codings.signed_levels import conditional_means
from tf_redsync.exchange import driver, loopback, traffic
from tf_redsync.exchange.layout import BucketLayout, TensorSpec, make_buckets
from tf_redsync.step.schedule_choice import for_buckets

SIDE = 2048  # 2^22 elements


def exchanged(method, gradient, steps=1, workers=1):
    """Runs steps in which every worker has the same gradient, and returns all of them."""
    layout = BucketLayout((TensorSpec("w", gradient.shape),), workers)
    states, history = loopback.initial_states(method, layout), []
    for number in range(steps):
        grads = [[tf.constant(gradient)] for _ in range(workers)]
        history.append(loopback.run_step(method, layout, grads, states, number))
        states = history[-1].states
    return history


@pytest.fixture(scope="module")
def laplace():
    rng = np.random.default_rng(0)
    return rng.laplace(size=(SIDE, SIDE)).astype(np.float32)


def entropy_bits(n: int, k: int) -> float:
    """Returns log2 of the number of ways to choose k of n."""
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


@pytest.mark.parametrize("value_bits", [1, 4])
@pytest.mark.parametrize("density", [0.001, 0.01])
def test_message_size_is_near_the_entropy(laplace, density, value_bits):
    """Within 5.5 % of log2 C(n, k) plus the bits of the values, including headers."""
    method = rs.CodedTopK(density=density, value_bits=value_bits)
    (step,) = exchanged(method, laplace)
    (request,), k = step.requests, round(density * laplace.size)
    bits = 8 * driver.payload_bytes(request)
    bound = entropy_bits(laplace.size, k) + k * value_bits
    # at most 5.2 % above it: the capacity for the worst positions
    assert bound < bits < 1.055 * bound
    # The message holds all positions.
    assert np.count_nonzero(step.totals[0][0]) == k


@pytest.mark.parametrize(("density", "captured"), [(0.001, 0.984), (0.01, 0.968)])
def test_one_bit_keeps_the_energy_of_the_top_k(laplace, density, captured):
    """As the class's docstring states; more bits keep more."""
    shares = []
    for value_bits in (1, 2, 4, 16):
        method = rs.CodedTopK(density=density, value_bits=value_bits)
        total = np.asarray(exchanged(method, laplace)[0].totals[0][0], np.float64)
        true = np.where(total != 0, laplace, 0.0)
        shares.append(1 - np.square(true - total).sum() / np.square(true).sum())
    assert shares[0] == pytest.approx(captured, abs=0.003)
    assert shares == sorted(shares) and shares[2] > 0.99 and shares[3] > 0.99999


@pytest.mark.parametrize("value_bits", [1, 3])
def test_all_gradients_are_delivered(value_bits):
    """With the same gradient in every step, totals sum to all of it except a bounded residual."""
    gradient = np.random.default_rng(1).normal(size=(30, 40)).astype(np.float32)
    rests = []
    method = rs.CodedTopK(density=0.05, dense_below=0, value_bits=value_bits)
    history = exchanged(method, gradient, steps=60)
    for steps in (30, 60):
        delivered = sum(np.float64(h.totals[0][0]) for h in history[:steps])
        rests.append(np.abs(steps * gradient - delivered).max())
    assert rests[1] < 1.3 * rests[0] < 0.5 * np.abs(60 * gradient).max()


def test_equally_spaced_positions_are_sent_in_full():
    """Their codes are longer than the average of random positions."""
    gradient = np.full((100, 330), 1e-4, np.float32)
    gradient.reshape(-1)[32::33] = 1.0
    (step,) = exchanged(rs.CodedTopK(density=0.0303, value_bits=16), gradient)
    total = np.asarray(step.totals[0][0]).reshape(-1)
    np.testing.assert_array_equal(np.flatnonzero(total), np.arange(32, 33_000, 33))


def test_small_tensors_share_the_message():
    specs = [TensorSpec("kernel", (64, 64), position=0), TensorSpec("bias", (64,), position=1)]
    method = rs.CodedTopK(density=0.01, dense_below=4096)
    densely = dataclasses.replace(method, small_density=None)
    buckets, sent = {}, {}
    for m in (method, densely):
        pairs = [(a.spec, a.method) for a in rs.Policy(default=m).assign(specs)]
        buckets[m] = make_buckets(pairs, 2)
        sent[m] = for_buckets(buckets[m], 2).bytes_per_step(2)
    assert [b.method for b in buckets[method]] == [method]
    assert [b.method for b in buckets[densely]] == [rs.Dense(), densely]
    assert [method.k(s) for s in specs] == [41, 6]
    assert sent[method] < 0.5 * sent[densely]
    # Never fewer than of large ones.
    assert rs.CodedTopK(density=0.5, small_density=0.1).k(specs[1]) == 32


def test_bytes_count_biases_of_any_rank_as_small():
    spec = TensorSpec("attention/query/bias", (16, 128))
    layout = BucketLayout((spec,), workers=2)
    method = rs.CodedTopK(density=0.01, small_density=0.25)
    assert spec.bytes > method.dense_below and method.k(spec) == spec.size // 4
    ((_, payload),) = method.payloads(layout, 0)
    assert traffic.bytes_sent(traffic.messages(method, layout)) == payload


def test_local_steps_have_a_sync_schedule():
    """The schedule also applies to small, densely sent tensors."""
    method = rs.CodedTopK(steps=7, small_density=None)
    assert method.sync_schedule.local_steps == method.dense().sync_schedule.local_steps == 7
    assert (
        rs.CodedTopK().sync_schedule.local_steps
        == rs.CodedTopK().dense().sync_schedule.local_steps
        == 0
    )


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_conditional_means(depth):
    values = np.random.default_rng(2).standard_t(3, 1000).astype(np.float32)
    padded = tf.constant(np.concatenate([values, np.zeros(24, np.float32)]))
    means, sets = (np.asarray(t) for t in conditional_means(padded, tf.constant(1000), depth))
    magnitudes = np.abs(values)
    for number in range(2**depth):
        inside = magnitudes[sets[:1000] == number]
        assert means[number] == pytest.approx(inside.mean(), rel=1e-6)
        # A set lies on one side of the mean at which it was divided.
        both = magnitudes[sets[:1000] // 2 == number // 2]
        side = inside > both.mean() if number % 2 else inside <= both.mean()
        assert depth == 0 or side.all()


def test_splitting_at_the_mean_beats_uniform_levels():
    """Compared with linear or logarithmic levels between the smallest and the largest magnitude."""
    rng = np.random.default_rng(3)
    for draw in (rng.laplace, rng.standard_normal, lambda size: rng.standard_t(3, size)):
        values = np.sort(np.abs(draw(size=400_000)))[-4000:].astype(np.float32)
        for depth in (0, 1):
            means, sets = conditional_means(tf.constant(values), tf.constant(4000), depth)
            error = np.square(values - tf.gather(means, sets).numpy()).sum()
            for scale, back in ((lambda x: x, lambda x: x), (np.log, np.exp)):
                low, high = scale(values[0]), scale(values[-1])
                step = (high - low) / 2**depth
                cell = np.minimum((scale(values) - low) // step, 2**depth - 1)
                assert error < np.square(values - back(low + (cell + 0.5) * step)).sum()


@loop(
    ("options", "text"),
    [
        ({"density": 0.0}, "`density` must be in"),
        ({"value_bits": 5}, "`value_bits` must be one of.*value_bits=5"),
        ({"value_bits": 0}, "`value_bits`"),
        ({"value_bits": "bfloat16"}, "`value_bits`"),
        ({"momentum": 1.0}, "`momentum` must be in"),
        ({"nesterov": True}, "nesterov"),
        ({"warm_up": rs.ExponentialWarmUp(10)}, "`warm_up` must be None or DenseWarmUp"),
        ({"clip_norm": -1.0}, "`clip_norm`"),
        ({"small_density": 0.0}, "`small_density` must be in"),
        ({"small_density": 1.5}, "`small_density` must be in"),
        ({"steps": 0}, "`steps` must be an integer >= 1. Received: steps=0"),
        ({"steps": 5, "momentum": 0.9}, "`momentum`.*momentum=0.9, steps=5"),
        ({"steps": 5, "clip_norm": 1.0}, "`clip_norm`.*clip_norm=1.0, steps=5"),
    ],
)
def test_bad_arguments(options, text):
    with pytest.raises(ValueError, match=text):
        rs.CodedTopK(**options)
    assert rs.CodedTopK(value_bits=16).traits.conserves
    assert not rs.CodedTopK(momentum=0.9).traits.conserves


@pytest.mark.parametrize("bits", [0, 5, 2.0])
def test_bad_bits_of_levels(bits):
    with pytest.raises(ValueError, match="`bits` must"):
        codings.SignedLevels(bits=bits)


def test_wrappers_that_code_values_reject_it():
    with pytest.raises(ValueError, match="selected elements"):
        rs.Coded(method=rs.CodedTopK())
    with pytest.raises(ValueError, match="`method` must be.*Received: method=CodedTopK"):
        rs.HalfPrecision(method=rs.CodedTopK())


def test_values_of_other_sparsifiers():
    """The coding also serves `Coded`: equal bits to the method's."""
    gradient = np.random.default_rng(4).normal(size=(64, 33)).astype(np.float32)
    wrapped = rs.Coded(
        method=rs.TopK(density=0.05), indices=codings.Golomb(), values=codings.SignedLevels(bits=2)
    )
    direct = exchanged(rs.CodedTopK(density=0.05, value_bits=2), gradient, steps=3)
    for a, b in zip(direct, exchanged(wrapped, gradient, steps=3), strict=True):
        np.testing.assert_array_equal(a.totals[0][0], b.totals[0][0])
