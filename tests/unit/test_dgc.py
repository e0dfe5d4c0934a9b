"""DGC: sampling, threshold quality, clipping, warm-up, bad input."""

import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from tests.loops import loop
from tf_redsync.exchange import loopback
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout, TensorSpec

SIZE = 50_000
SPEC = TensorSpec("w", (250, 200))
DISTRIBUTIONS = {
    "normal": lambda rng: rng.standard_normal(SIZE),
    "laplace": lambda rng: rng.laplace(size=SIZE),
    "student": lambda rng: rng.standard_t(3, SIZE),
    "log_normal": lambda rng: np.exp(rng.standard_normal(SIZE)),
    "rows_of_unequal_size": lambda rng: (
        rng.standard_normal((250, 200)) * np.linspace(0.1, 3, 250)[:, None]
    ),
}


def one_step(method, values):
    grads = [[tf.constant(values.reshape(SPEC.shape), tf.float32)]]
    layout = BucketLayout((SPEC,), 1)
    states = loopback.initial_states(method, layout)
    return np.array(loopback.run_step(method, layout, grads, states, 0).totals[0][0])


@loop("density", [0.01, 0.001])
@loop("name", DISTRIBUTIONS)
def test_sends_about_k_of_the_largest_elements(name, density):
    values = DISTRIBUTIONS[name](np.random.default_rng(3))
    k = int(density * SIZE)
    total = one_step(rs.DGC(density=density), values).reshape(-1)
    sent = np.flatnonzero(total)
    assert 0.8 * k <= sent.size <= k
    largest = np.argsort(-np.abs(values.reshape(-1)))[: sent.size]
    assert set(sent) == set(largest)
    np.testing.assert_array_equal(total[sent], np.float32(values.reshape(-1)[sent]))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.zeros(SIZE), 0),
        (np.full(SIZE, 0.5), 50),
        (np.eye(1, SIZE, 777)[0], 1),  # one outlier, not in the sample
        (np.where(np.arange(SIZE) < 30, 1.0, 0.0), 30),  # fewer than k nonzero elements
    ],
)
def test_inputs_that_mislead_the_sample(values, expected):
    assert np.count_nonzero(one_step(rs.DGC(density=0.001), values)) == expected


def test_threshold_is_lowered_a_bounded_number_of_times():
    """The sample has only large elements; ten steps of 0.8 reach down to 0.107 of them."""
    method = rs.DGC(density=0.01, sample_ratio=0.02)
    draw = method.draw(tf.constant(0, tf.int64))
    sampled = np.array(method.sample(SPEC, draw))
    for small, expected in ((0.5, 0.8**4), (0.05, 0.8**10)):
        values = np.full(SIZE, small, np.float32)
        values[sampled] = 1.0
        values[sampled[len(sampled) // 4 :]] = 0.0  # 250 ones, half of k
        threshold = method.threshold(SPEC, tf.constant(values), 500, draw)
        assert float(threshold) == pytest.approx(expected)


def test_sample():
    """One per cent at an odd stride, with an offset that reaches every element."""
    method, starts = rs.DGC(density=0.1), set()
    for step in range(300):
        at = np.array(method.sample(SPEC, method.draw(tf.constant(step, tf.int64))))
        assert at[0] >= 0 and at[-1] < SIZE
        assert set(np.diff(at)) == {99}
        starts.add(at[0])
    assert at.size == 505 and min(starts) == 0 and max(starts) == 98
    assert np.array(method.sample(SPEC, tf.constant(np.nextafter(1, 0, dtype="f4"))))[0] == 98


def test_small_tensors_are_sampled_more_densely():
    """Ten elements above the threshold: all of 5000 elements at density 0.002, 1 % of 1e7."""
    method = rs.DGC(density=0.002)
    assert method.sample_size(TensorSpec("w", (50, 100))) == 5000
    assert method.sample_size(TensorSpec("w", (1000, 10_000))) == pytest.approx(100_000, rel=0.02)
    assert method.describe(TensorSpec("w", (50, 100))) == "threshold from 5000 of 5000 elements"


def test_local_clipping():
    """Every worker's gradient has at most the norm clip_norm / sqrt(P)."""
    grads = [tf.constant([3.0, 0.0]), tf.constant([[4.0]])]
    scale = rs.DGC(clip_norm=2.0).clip_scale(grads, 4)
    assert float(scale) == pytest.approx(2.0 / np.sqrt(4) / 5.0)
    assert rs.DGC().clip_scale(grads, 4) is None


def test_ramp_in_graph_mode():
    """With a symbolic step, messages have the sizes of the stage."""
    method = rs.DGC(density=0.01, warm_up=rs.ExponentialWarmUp(2, (0.25, 0.05)))
    layout = BucketLayout((SPEC,), 1)
    gradient = tf.random.stateless_normal(SPEC.shape, [1, 2], alg="philox")

    @tf.function(input_signature=[tf.TensorSpec([], tf.int64)])
    def words(step):
        exchange = method.exchange([gradient], method.init(layout), Context(layout, 0, step))
        return tf.size(next(exchange).message)

    found = [int(words(step)) for step in range(6)]
    assert found == [2 + 2 * int(SIZE * d) for d in (0.25, 0.25, 0.05, 0.05, 0.01, 0.01)]


def test_dense_tensors_get_the_same_momentum():
    method = rs.DGC(momentum=0.7, nesterov=True)
    assert method.dense() == rs.Dense(momentum=0.7, nesterov=True)
    assert method.traits.momentum_in_exchange == 0.7
    assert "rank 1" in method.refuses(TensorSpec("bias", (5000,)))


@loop(
    "options",
    [
        {"density": 0.0},
        {"momentum": 1.0},
        {"sample_ratio": 0.0},
        {"sample_ratio": 1.1},
        {"lower_bound": 1.0},
        {"max_adaptations": -1},
        {"seed": -1},
        {"clip_norm": 0.0},
        {"clip_norm": float("inf")},
        {"warm_up": 5},
    ],
)
def test_bad_input(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"`{name}`.*Received: {name}={value!r}"):
        rs.DGC(**options)
