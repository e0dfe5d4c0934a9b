"""SignSGD, Signum, EF-SignSGD, 1-bit SGD: votes, quality, bits, bad input."""

import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from tests.oracle.signs import OneBitAdamOracle
from tf_redsync.exchange import loopback
from tf_redsync.exchange.layout import BucketLayout, TensorSpec, make_buckets
from tf_redsync.network.collectives import Alone
from tf_redsync.step.exchange_schedule import ExchangeSchedule, Inputs

FEEDBACK = (rs.EFSignSGD, rs.contrib.OneBitSGD)


def run(method, grads, steps=1, first=0):
    """Returns totals of every step and the last states; `grads[worker]` is constant."""
    spec = TensorSpec("w", np.shape(grads[0]))
    layout = BucketLayout((spec,), len(grads))
    inputs = [[tf.constant(g, tf.float32)] for g in grads]
    states, totals = loopback.initial_states(method, layout), []
    for number in range(first, first + steps):
        step = loopback.run_step(method, layout, inputs, states, number)
        states = step.states
        totals.append(np.array(step.totals[0][0]))
    return totals, states, step


def test_majority_decides_and_a_tie_is_zero():
    rows = np.float32([[1e-9, 5, -1, 1], [2, -1, -1e9, 1], [3, -1, 7, -1], [-4, 1, -1, -1]])
    np.testing.assert_array_equal(run(rs.SignSGD(), rows[:3])[0][0], [1, -1, -1, 1])
    np.testing.assert_array_equal(run(rs.SignSGD(), rows)[0][0], [1, 0, -1, 0])


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("method", [rs.SignSGD(), rs.contrib.Signum()])
def test_weights_without_a_gradient_do_not_drift(method, workers):
    zeros = np.float32([0.0, -0.0, 0.0])
    totals, _, _ = run(method, [zeros] * workers, steps=2)
    assert np.abs(totals[0]).max() == workers % 2
    np.testing.assert_array_equal(totals[0] + totals[1], 0.0)
    # Where one worker has a gradient and the number of zeros is even, its sign decides.
    if workers == 3:
        rows = [zeros, zeros, np.float32([1, -1, 1])]
        for total in run(method, rows, steps=4)[0]:
            assert abs(total).max() == 1


@pytest.mark.parametrize("workers", [2, 3])
def test_elements_without_a_gradient_are_in_no_mean(workers):
    """Momenta of 1 and -1 pass through one bit unchanged, however many elements are unseen."""
    seen = np.arange(100) % 10 == 0
    momenta = np.where(seen, np.where(np.arange(100) % 20 == 0, 1, -1), 0).astype(np.float32)
    method, layout = rs.contrib.OneBitAdam(), BucketLayout((TensorSpec("w", (100,)),), workers)
    masks = {"seen": [tf.constant(seen, tf.float32)], "momentum": [tf.constant(momenta)]}
    states = [{**s, **masks} for s in loopback.initial_states(method, layout)]
    grads = [[tf.constant(momenta / workers)]] * workers
    step = loopback.run_step(method, layout, grads, states, 0)
    np.testing.assert_allclose(step.totals[0][0], momenta, atol=1e-6)
    for state in step.states:
        np.testing.assert_allclose(state["residual"][0], 0.0, atol=1e-6)


LONG, SECOND = 60, 4  # 0.1 ** 60 is 0 in float32
RARE, NEVER = 0, 1  # elements with a gradient only in the first step, and in no step of the stage


def rare_gradients():
    """Returns `[step][worker][element]`: a long first stage, then one without rare elements."""
    grads = np.random.default_rng(3).standard_normal((LONG + SECOND, 2, 40)).astype(np.float32)
    grads[1:LONG, :, RARE] = 0.0
    grads[:LONG, :, NEVER] = 0.0
    return grads


@pytest.mark.parametrize(
    "method", [rs.contrib.OneBitAdam(beta_1=0.1), rs.contrib.ZeroOneAdam(beta_1=0.1)]
)
def test_element_with_underflowed_momentum_still_moves(method):
    grads = rare_gradients()
    layout = BucketLayout((TensorSpec("w", (40,)),), 2)
    oracle = OneBitAdamOracle.after(grads[:LONG].sum(axis=1)[:, np.newaxis], 2, beta_1=0.1)
    states = loopback.initial_states(method, layout)
    second = "exchange" if isinstance(method, rs.contrib.OneBitAdam) else "momentum_exchange"
    for number, rows in enumerate(grads):
        phase = "dense_exchange" if number < LONG else second
        inputs = [[tf.constant(g)] for g in rows]
        step = loopback.run_step(method, layout, inputs, states, number, phase)
        states = step.states
        momentum = states[0]["momentum"][0].numpy()
        if number == LONG - 1:
            assert momentum[RARE] == 0.0
        if number >= LONG:
            (expected,) = oracle.step([[g] for g in rows])
            np.testing.assert_allclose(momentum, expected, rtol=1e-4, atol=1e-6)
            assert momentum[RARE] != 0.0 and momentum[NEVER] == 0.0


@pytest.mark.parametrize(("steps", "factor"), [(1, 10.0), (4, 4.4), (16, 1.85)])
def test_weight_decay_acts_several_times_in_rounds_of_zero_one_adam(steps, factor):
    """The documented factors, with gradients of 0: the exchanged momentum contains the decay."""
    method, layout = rs.contrib.ZeroOneAdam(), BucketLayout((TensorSpec("w", (1,)),), 2)
    rate, decay, weight = 1e-3, 1e-2, np.ones(1, "float32")
    state = {**method.init(layout), "variance": [tf.ones([1])]}
    for number in range(40):
        start = weight
        for _ in range(steps):
            (momentum,), state = method.local_step([tf.zeros([1])], state)
            weight = weight - rate * (momentum.numpy() + decay * weight)
        state = {**state, "rates": [tf.constant(steps * rate)]}
        changes = [[tf.constant((weight - start) / 2)]] * 2
        round_ = loopback.run_step(method, layout, changes, [state] * 2, number)
        state, weight = round_.states[0], start + np.array(round_.totals[0][0])
    assert (start - weight) / (steps * rate * decay * start) == pytest.approx(factor, rel=0.03)


def test_signum_votes_with_the_moving_average():
    """Two small gradients after a large one do not change the sign; without momentum they do."""
    layout = BucketLayout((TensorSpec("w", ()),), 1)
    for momentum, expected in ((0.9, [1, 1, 1]), (0.0, [1, -1, -1])):
        method = rs.contrib.Signum(momentum=momentum)
        states, signs = loopback.initial_states(method, layout), []
        for number, g in enumerate((1.0, -0.1, -0.1)):
            step = loopback.run_step(method, layout, [[tf.constant(g)]], states, number)
            states = step.states
            signs.append(float(step.totals[0][0]))
        assert signs == expected
    assert (
        rs.contrib.Signum().traits.momentum_in_exchange == 0.9
        and rs.SignSGD().traits.momentum_in_exchange == 0.0
    )


def test_one_worker_also_takes_signs():
    """The learning rate has the same meaning for one worker and for many."""
    program = ExchangeSchedule(make_buckets([(TensorSpec("w", (3,)), rs.SignSGD())], 1))
    grads = [[tf.constant([0.3, -2.0, 1e-6])]]
    outcome = program.run(Inputs(grads, [{}], None, tf.constant(0, tf.int64), Alone()))
    np.testing.assert_array_equal(outcome.results[0][0][0], [1, -1, 1])


def test_scaled_signs_keep_their_energy():
    """||p - D||^2 = ||p||^2 - ||p||_1^2 / d: the best multiple of the sign."""
    p = np.random.default_rng(0).standard_normal((40, 30)).astype("f4")
    (total,), states, _ = run(rs.EFSignSGD(), [p])
    expected = np.square(p).sum() - np.abs(p).sum() ** 2 / p.size
    assert np.square(states[0]["residual"][0]).sum() == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(np.abs(total), np.abs(p).mean(), rtol=1e-5)


def test_one_bit_is_exact_for_two_values():
    """Workers' gradients have two values at the same positions: the residual is zero."""
    pattern = np.random.default_rng(1).random((30, 41)) < 0.3
    grads = [np.where(pattern, -0.5 * (i + 1), 0.25 * (i + 2)) for i in range(3)]
    (total,), states, _ = run(rs.contrib.OneBitSGD(), grads)
    np.testing.assert_allclose(total, sum(grads), rtol=1e-5)
    for state in states:
        np.testing.assert_allclose(state["residual"][0], 0.0, atol=1e-5)


def test_one_bit_uses_the_optimal_two_values():
    """With one worker: the means of both sides, and so the least error of one bit."""
    p = np.random.default_rng(2).standard_normal((50, 20)).astype("f4") + 0.2
    (total,), states, _ = run(rs.contrib.OneBitSGD(), [p])
    low, high = p[p < 0].mean(), p[p >= 0].mean()
    np.testing.assert_allclose(total, np.where(p < 0, low, high), rtol=1e-5)
    np.testing.assert_allclose(states[0]["residual"][0], p - total, atol=1e-6)


def test_own_block_is_quantized_once():
    """Worker b's residual in block b is only the error of the second quantization."""
    rng = np.random.default_rng(3)
    grads = [rng.standard_normal(64).astype("f4") for _ in range(2)]
    (total,), states, _ = run(rs.contrib.OneBitSGD(), grads)

    def two(x):
        return np.where(x < 0, x[x < 0].mean(), x[x >= 0].mean())

    block = grads[0][:32] + two(grads[1][:32])
    np.testing.assert_allclose(total[:32], two(block), rtol=1e-5)
    np.testing.assert_allclose(states[0]["residual"][0][:32], block - two(block), atol=1e-6)


def descend(method, pulls, rate, steps):
    """Returns ||w||^2 after descent on the sum of 0.5 ||w||^2 / K + pull_i w; pulls sum to 0."""
    workers, n = len(pulls), 32
    layout = BucketLayout((TensorSpec("w", (n,)),), workers)
    w, states = np.linspace(-1, 1, n), loopback.initial_states(method, layout)
    for number in range(steps):
        grads = [[tf.constant(w / workers + p, tf.float32)] for p in pulls]
        step = loopback.run_step(method, layout, grads, states, number)
        states, w = step.states, w - rate * np.float64(step.totals[0][0])
    return np.square(w).sum()


@pytest.mark.deep
@pytest.mark.parametrize("cls", FEEDBACK)
def test_error_feedback_converges_with_unequal_workers(cls):
    """One worker pulls against two others: the majority is wrong, the delivered sum is not."""
    pulls = [np.full(32, c) for c in (1.0, -0.5, -0.5)]
    assert descend(cls(), pulls, rate=0.05, steps=100) < 0.3
    assert descend(rs.SignSGD(), pulls, rate=0.01, steps=100) > 1.0


@pytest.mark.parametrize("workers", [2, 8])
def test_bits_per_element(workers):
    """Sent by each worker: K - 1 bits by one all-gather, 2 (K - 1) / K by the two phases."""
    specs = [TensorSpec("w", (256, 512))]
    n = specs[0].size

    def bits(method):
        program = ExchangeSchedule(make_buckets([(s, method) for s in specs], workers))
        return 8 * program.bytes_per_step(workers)

    header = 32 * 2  # flag and scale
    assert bits(rs.SignSGD()) == bits(rs.EFSignSGD()) == (workers - 1) * (n + header)
    header = 32 * 3  # flag and two means
    assert bits(rs.contrib.OneBitSGD()) == 2 * (workers - 1) * (n / workers + header)


def test_compressed_tensors():
    for cls in FEEDBACK:
        assert "rank 1" in cls().refuses(TensorSpec("bias", (5000,)))
        assert "dense_below" in cls().refuses(TensorSpec("w", (10, 10)))
        assert cls(dense_below=0).refuses(TensorSpec("w", (10, 10))) is None
        assert cls().dense() == rs.Dense()
    for method in (rs.SignSGD(), rs.contrib.Signum()):
        assert method.refuses(TensorSpec("bias", (5,))) is None and method.dense() is method


@pytest.mark.parametrize(
    ("cls", "name", "value"),
    [
        (rs.contrib.Signum, "momentum", 1.0),
        (rs.contrib.Signum, "momentum", -0.1),
        (rs.EFSignSGD, "dense_below", -1),
        (rs.contrib.OneBitSGD, "dense_below", 1.5),
        (rs.contrib.OneBitSGD, "warm_up", 3),
    ],
)
def test_bad_input(cls, name, value):
    with pytest.raises(ValueError, match=f"`{name}`.*Received: {name}={value!r}"):
        cls(**{name: value})


def test_dense_warm_up():
    assert rs.contrib.OneBitSGD(warm_up=rs.DenseWarmUp(7)).sync_schedule.warm_up_steps == 7
    assert rs.contrib.OneBitSGD().sync_schedule.warm_up_steps == 0
