"""COMP-AMS: AMSGrad against numpy, adaptive optimizers with delayed elements, warnings."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_redsync as rs
from tests.oracle.amsgrad import AMSGradOracle
from tests.oracle.momentum_adam import MomentumAdamOracle
from tf_redsync.exchange import loopback
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout, TensorSpec


@pytest.mark.parametrize("options", [{}, {"beta_1": 0.5, "beta_2": 0.9, "epsilon": 1e-2}])
def test_amsgrad_matches_the_paper(options):
    rng = np.random.default_rng(0)
    start = rng.standard_normal(50)
    weights, optimizer = tf.Variable(start, dtype=tf.float32), rs.AMSGrad(0.01, **options)
    reference = AMSGradOracle(start, 0.01, **options)
    for number in range(60):
        gradient = rng.standard_normal(50) * (rng.random(50) < 0.2) * 0.97**number
        optimizer.apply([tf.constant(gradient, tf.float32)], [weights])
        np.testing.assert_allclose(weights, reference.step(gradient), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_amsgrad_of_elements_without_gradients(dtype):
    weights, optimizer = tf.Variable([1.0, 2.0], dtype=dtype), rs.AMSGrad(0.1)
    optimizer.apply([tf.constant([0.0, 1.0], dtype)], [weights])
    first, second = np.asarray(weights, np.float32)
    assert first == 1.0 and 1.0 < second < 2.0


def test_amsgrad_with_several_variables_and_config():
    optimizer = rs.AMSGrad(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5), beta_1=0.8)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(again) is rs.AMSGrad and again.get_config() == optimizer.get_config()
    variables = [tf.Variable(tf.ones(s)) for s in ((2, 3), (4,))]
    optimizer.apply([tf.ones([2, 3]), tf.zeros([4])], variables)
    step = 0.1 * 0.2 / np.sqrt(0.001 + 1e-8)  # m = 0.2, h = 0.001: without bias correction
    np.testing.assert_allclose(variables[0], np.full((2, 3), 1 - step), rtol=1e-5)
    np.testing.assert_array_equal(variables[1], np.ones(4))


def test_amsgrad_of_frozen_model():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, trainable=False)])
    model.compile(rs.AMSGrad(), "mse")
    with pytest.warns(UserWarning, match="trainable weights"):
        model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
    model.optimizer.build([])
    assert len(model.optimizer.variables) == 2  # iterations and learning rate


@pytest.mark.parametrize("options", [{"beta_1": 1.0}, {"beta_2": -0.1}, {"epsilon": -1.0}])
def test_bad_amsgrad_arguments(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"`{name}`.*Received: {name}={value!r}"):
        rs.AMSGrad(**options)


@pytest.mark.parametrize("density", [1.0, 0.1])
def test_algorithm_2_matches_the_paper(density):
    """Error feedback and top-k on every worker, the mean, then AMSGrad."""
    rng, workers, shape, k = np.random.default_rng(1), 4, (40, 30), int(1200 * density)
    start = rng.standard_normal(shape)
    weights, reference = tf.Variable(start, dtype=tf.float32), AMSGradOracle(start, 0.001)
    method, amsgrad = rs.contrib.CompAMS(density=density, dense_below=0), rs.AMSGrad(0.001)
    layout = BucketLayout((TensorSpec("w", shape),), workers)
    step = loopback.traced_step(method, layout)
    states = loopback.initial_states(method, layout)
    errors = np.zeros((workers, 1200))
    for number in range(30):
        gradients = 0.1 * (0.3 * start + rng.standard_normal((workers, *shape)))
        sums = errors + gradients.reshape(workers, -1)
        sent = np.zeros_like(sums)
        for worker in range(workers):
            chosen = np.argsort(-np.abs(sums[worker]))[:k]
            sent[worker, chosen] = sums[worker, chosen]
        errors = sums - sent
        expected = reference.step(sent.mean(0).reshape(shape))
        outcome = step([[tf.constant(g / workers, tf.float32)] for g in gradients], states, number)
        states = outcome.states
        amsgrad.apply([outcome.totals[0][0]], [weights])
        np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-5)
    if density == 1.0:
        np.testing.assert_array_equal(errors, 0.0)


@pytest.mark.parametrize("method", [rs.GMC(density=1.0), rs.Dense(momentum=0.9)])
def test_adam_after_exchange_momentum(method):
    rng, workers = np.random.default_rng(0), 2
    start = rng.standard_normal((8, 10))
    weights, reference = tf.Variable(start, dtype=tf.float32), MomentumAdamOracle(start, 0.01)
    adam = keras.optimizers.Adam(0.01, beta_1=0.0)
    layout = BucketLayout((TensorSpec("w", (8, 10)),), workers)
    step = loopback.traced_step(method, layout)
    states = loopback.initial_states(method, layout)
    for number in range(20):
        gradients = rng.standard_normal((workers, 8, 10)) / workers
        outcome = step([[tf.constant(g, tf.float32)] for g in gradients], states, number)
        states = outcome.states
        adam.apply([outcome.totals[0][0]], [weights])
        expected = reference.step(gradients.sum(0))
        np.testing.assert_allclose(weights, expected, rtol=0, atol=2e-5)
    assert np.abs(reference.weights - start).max() > 0.05


# ------------------------------------------------------------- delayed elements (adaptive.md)


def update_after_wait(make, before: int, wait: int) -> float:
    """Returns the update of an element that is sent once after a delay, in learning rates.

    Its gradient was 1 or -1 in each of `before` steps, then it was left out for `wait` steps; 99
    other elements always have a gradient. beta_2 is 0.99: the second moment decays within 100
    steps.
    """
    rate, optimizer = 0.001, make(0.001, beta_2=0.99)
    weights = tf.Variable(tf.ones([100]))
    optimizer.build([weights])

    @tf.function(autograph=False)
    def run(first, steps, mean):
        def body(number):
            signs = tf.sign(
                tf.random.stateless_uniform([100], tf.stack([number, first]), -1.0, 1.0)
            )
            own = tf.where(mean == 0.0, signs[:1], mean)
            optimizer.apply([tf.concat([own, signs[1:]], 0)], [weights])
            return number + 1

        tf.while_loop(lambda number: number < steps, body, [tf.constant(0)])

    quiet = tf.constant([1e-30])  # its square is 0
    for number, (steps, mean) in enumerate(((before, tf.zeros([1])), (wait, quiet))):
        run(tf.constant(number), tf.constant(steps), mean)
    start = float(weights[0])
    run(tf.constant(2), tf.constant(1), tf.ones([1]))
    run(tf.constant(3), tf.constant(50), quiet)
    return (start - float(weights[0])) / rate


ADAM = (keras.optimizers.Adam, keras.optimizers.Lamb)


@pytest.mark.parametrize("make", ADAM)
def test_adam_and_lamb_take_long_steps_after_delays(make):
    short, long = update_after_wait(make, 100, 10), update_after_wait(make, 100, 1000)
    assert long > 5 * short > 0


@pytest.mark.parametrize(
    "make", [rs.AMSGrad, lambda *a, **o: keras.optimizers.Adam(*a, amsgrad=True, **o)]
)
def test_amsgrad_takes_no_long_steps(make):
    short, long = update_after_wait(make, 100, 10), update_after_wait(make, 100, 1000)
    assert 0 < long < 1.5 * short


def test_amsgrad_does_not_help_elements_sent_for_the_first_time():
    """The first step is (1 - beta_1) / sqrt(1 - beta_2); the momentum's sum is ten times that."""
    assert update_after_wait(rs.AMSGrad, 0, 1000) == pytest.approx(10.0, rel=0.02)


# --------------------------------------------------------------------------------------- warnings


def messages(inner, method):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        rs.DistributedOptimizer(inner, method)
    about = ("second moment", "made for AMSGrad")
    caught = [w for w in caught if any(text in str(w.message) for text in about)]
    assert all(w.filename == __file__ for w in caught)  # where DistributedOptimizer was called
    return [str(w.message) for w in caught]


LEGACY = tf_keras.optimizers.legacy


@pytest.mark.parametrize(
    "adam", [keras.optimizers.Adam, keras.optimizers.Lamb, tf_keras.optimizers.Adam, LEGACY.Adam]
)
def test_warns_if_delays_exceed_the_second_moments_memory(adam):
    (text,) = messages(adam(0.01), rs.TopK(density=0.001))
    assert "TopK sends an element every 1000 steps" in text and adam.__name__ in text
    assert "1000 steps" in text.split("decays in")[1]
    assert not messages(adam(0.01), rs.TopK(density=0.01))
    assert messages(adam(0.01, beta_2=0.99), rs.TopK(density=0.01))
    assert not messages(adam(0.01), rs.EFSignSGD())  # every message has all elements
    policy = rs.Policy(default=rs.Dense(), rules=(rs.Rule(pattern="k", method=rs.RandomK()),))
    assert messages(adam(0.01, beta_2=0.9), policy)


def test_warnings_are_about_the_optimizer_inside_one_of_addons():
    lookahead = rs.addons.load().optimizers.Lookahead
    assert not messages(lookahead(LEGACY.Adam(0.01, amsgrad=True)), rs.TopK(density=0.001))
    (text,) = messages(lookahead(LEGACY.Adam(0.01)), rs.TopK(density=0.001))
    assert "second moment of Adam decays" in text


@pytest.mark.parametrize(
    "inner",
    [
        lambda: rs.AMSGrad(0.01),
        lambda: keras.optimizers.Adam(0.01, amsgrad=True),
        lambda: tf_keras.optimizers.Adam(0.01, amsgrad=True),
        lambda: LEGACY.Adam(0.01, amsgrad=True),
        lambda: keras.optimizers.LossScaleOptimizer(rs.AMSGrad(0.01)),
    ],
)
def test_no_warning_with_amsgrad(inner):
    assert not messages(inner(), rs.TopK(density=0.0001))
    assert not messages(inner(), rs.contrib.CompAMS(density=0.0001))


@pytest.mark.parametrize(
    "method",
    [
        rs.SBC(density=0.001),
        rs.CodedTopK(density=0.001, steps=10),
        rs.LocalSGD(steps=4),
        rs.HalfPrecision(method=rs.LocalSGD(steps=4)),
    ],
    ids=repr,
)
def test_no_warning_with_local_steps(method):
    """Each worker's optimizer sees its own gradient in every step."""
    assert method.sync_schedule.local_steps and not messages(keras.optimizers.Adam(0.01), method)


def test_warns_without_local_steps():
    assert messages(keras.optimizers.Adam(0.01), rs.CodedTopK(density=0.001, small_density=None))


def test_comp_ams_expects_amsgrad():
    for inner in (keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.1)):
        (text,) = messages(inner, rs.contrib.CompAMS())
        assert f"Received: {type(inner).__name__}" in text
    assert not messages(keras.optimizers.SGD(0.1), rs.TopK(density=0.0001))


# ------------------------------------------------------------------------------------- the method


def test_comp_ams_converges_like_uncompressed_amsgrad():
    """On a quadratic, 5 % of the elements give nearly the loss of the full gradient."""
    spec, workers = TensorSpec("w", (20, 20)), 4
    rng = np.random.default_rng(3)
    targets = tf.constant(rng.standard_normal((workers, *spec.shape)), tf.float32)
    best = targets - tf.reduce_mean(targets, 0)

    def train(method):
        weights, optimizer = tf.Variable(tf.fill(spec.shape, 2.0)), rs.AMSGrad(0.04)
        optimizer.build([weights])
        apply = tf.function(lambda total: optimizer.apply([total], [weights]), autograph=False)
        layout = BucketLayout((spec,), workers)
        states, step = loopback.initial_states(method, layout), loopback.traced_step(method, layout)
        for number in range(250):
            grads = [[g] for g in tf.unstack((weights - targets) / workers)]
            outcome = step(grads, states, number)
            states = outcome.states
            apply(outcome.totals[0][0])
        return float(tf.reduce_mean((weights - targets) ** 2) - tf.reduce_mean(best**2))

    start = 4.0
    full = train(rs.Dense())
    assert full < 0.01 * start
    for method in (rs.contrib.CompAMS(density=0.05), rs.contrib.CompAMS(compressor="block_sign")):
        assert train(method) < 0.02 * start


def test_payload_bits():
    """Two words for 1 % of the elements, or one bit per element, instead of 32 bits each."""
    spec = TensorSpec("w", (1000, 1000))
    layout, grads = BucketLayout((spec,), 2), [tf.zeros(spec.shape)]
    for method, bits in (
        (rs.contrib.CompAMS(), 0.64),
        (rs.contrib.CompAMS(compressor="block_sign"), 1.0),
    ):
        ctx = Context(layout, 0, tf.constant(0, tf.int64))
        request = next(method.exchange(grads, method.init(layout), ctx))
        assert 32 * request.message.shape[0] / spec.size == pytest.approx(bits, rel=1e-3)


@pytest.mark.parametrize("options", [{"compressor": "signs"}, {"density": 0.0}])
def test_bad_input(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"`{name}`.*Received: {name}={value!r}"):
        rs.contrib.CompAMS(**options)
