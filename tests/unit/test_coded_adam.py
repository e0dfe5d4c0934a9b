"""CodedAdam: Adam itself with one worker and in dense steps, its scale, and bad arguments."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_redsync as rs
from tf_redsync.auto import cost
from tf_redsync.auto.decision import Measured
from tf_redsync.exchange import loopback
from tf_redsync.exchange.layout import BucketLayout, TensorSpec, make_buckets
from tf_redsync.planning import prediction
from tf_redsync.step.exchange_schedule import ExchangeSchedule

SPECS = (TensorSpec("a/kernel", (60, 50), position=0), TensorSpec("b/kernel", (30, 7), position=1))
STEPS = 12


def gradients(number, workers):
    rng = np.random.default_rng([number, workers])
    return [
        [tf.constant(rng.standard_t(4, s.shape) / workers, tf.float32) for s in SPECS]
        for _ in range(workers)
    ]


def adam_weights(totals_of_steps, rate=1e-2):
    """Returns the weights after Keras's AdamW without momentum, from 1."""
    variables = [keras.Variable(np.ones(s.shape), name=f"v{s.position}") for s in SPECS]
    adam = keras.optimizers.AdamW(rate, beta_1=0.0, epsilon=1e-12, weight_decay=0.1)
    for totals in totals_of_steps:
        adam.apply(totals, variables)
    return [v.numpy() for v in variables]


def test_one_worker_is_adam():
    """AdamW with beta_1 = 0."""
    method, layout = rs.CodedAdam(epsilon=1e-12), BucketLayout(SPECS, 1)
    states, sums = loopback.initial_states(method, layout), []
    variables = [keras.Variable(np.ones(s.shape), name=f"w{s.position}") for s in SPECS]
    sgd = keras.optimizers.SGD(1e-2, weight_decay=0.1)
    for number in range(STEPS):
        (grads,) = gradients(number, 1)
        sums.append(grads)
        step = loopback.run_step(method, layout, [grads], states, number, phase="dense_exchange")
        states = step.states
        sgd.apply(step.totals[0], variables)
    for found, expected in zip(variables, adam_weights(sums), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_workers_agree_in_dense_steps_after_compressed_ones():
    """Their second moments differ, as after `disable()`."""
    method, layout = rs.CodedAdam(), BucketLayout(SPECS, 3)
    states = loopback.initial_states(method, layout)
    for number, phase in enumerate(["exchange"] * 3 + ["dense_exchange"] * 2 + ["exchange"]):
        grads = gradients(number, 3)
        step = loopback.run_step(method, layout, grads, states, number, phase=phase)
        states = step.states
        for other in step.totals[1:]:
            for a, b in zip(step.totals[0], other, strict=True):
                np.testing.assert_array_equal(a, b)
    assert np.any(states[0]["variance"][0] != states[1]["variance"][0])


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_residuals_do_not_depend_on_the_scale_of_the_gradients(factor):
    method, layout = rs.CodedAdam(density=0.2, epsilon=1e-12), BucketLayout(SPECS, 2)
    residuals = []
    for scale in (1.0, factor):
        states = loopback.initial_states(method, layout)
        for number in range(STEPS):
            grads = [[scale * g for g in own] for own in gradients(number, 2)]
            step = loopback.run_step(method, layout, grads, states, number)
            states = step.states
        residuals.append(np.concatenate([np.ravel(t) for t in states[0]["residual"]]))
    # All first updates have magnitude 1 / sqrt(2) up to rounding, so the first selections differ.
    assert abs(np.linalg.norm(residuals[0]) / np.linalg.norm(residuals[1]) - 1.0) < 0.02


@pytest.mark.parametrize("phase", ["exchange", "dense_exchange"])
def test_gradients_whose_squares_overflow_are_not_finite(phase):
    """So the step is skipped, and the second moment keeps its value."""
    method, layout = rs.CodedAdam(density=0.05), BucketLayout(SPECS, 2)
    states = loopback.initial_states(method, layout)
    grads = gradients(0, 2)
    for large, finite in ((1e18, True), (2e19, False)):
        grads[1][0] = tf.tensor_scatter_nd_update(grads[1][0], [[3, 4]], [large])
        step = loopback.run_step(method, layout, grads, states, 0, phase=phase)
        assert bool(step.finite) == finite


def test_noise_moves_weights_as_far_as_dense_adam():
    """The factor K: with noise the second moment of one worker is K times that of the mean."""
    workers, lengths = 4, []
    for of_mean in (True, False):
        method = rs.CodedAdam(beta_2=0.9)
        layout = BucketLayout(SPECS, 1 if of_mean else workers)
        states = loopback.initial_states(method, layout)
        for number in range(30):
            grads = gradients(number, workers)
            if of_mean:
                grads = [[tf.add_n(list(parts)) for parts in zip(*grads, strict=True)]]
            step = loopback.run_step(method, layout, grads, states, number, phase="dense_exchange")
            states = step.states
        lengths.append(np.linalg.norm(np.ravel(step.totals[0][0])))
    assert lengths[1] == pytest.approx(lengths[0], rel=0.15)


def test_bytes_include_the_means():
    """The plan and `explain` count an all-reduce of 32 bits per element every 100 steps."""
    own, averaged = rs.CodedAdam(), rs.CodedAdam(average_every=100)
    workers, elements = 16, sum(s.size for s in SPECS)
    means = 2 * (workers - 1) / workers * 4 * elements
    for sent in (
        lambda m: prediction.mean_bytes_sent(m, SPECS, workers),
        lambda m: ExchangeSchedule(make_buckets([(s, m) for s in SPECS], workers)).bytes_per_step(
            workers
        ),
    ):
        assert sent(averaged) - sent(own) == pytest.approx(means / 100)
    (bucket,) = make_buckets([(s, averaged) for s in SPECS], workers)
    link = cost.Link.of(rate=1e6, latency=0.0)
    found = prediction.exchange_of_bucket(bucket, Measured(workers, link, {}), compute=1.0)
    assert found.longest - found.network == pytest.approx(0.99 * means / 1e6, rel=0.01)


@pytest.mark.parametrize(
    ("inner", "received"),
    [
        (keras.optimizers.AdamW(1e-3, beta_1=0.0), "AdamW"),
        (keras.optimizers.SGD(0.1, momentum=0.9), "momentum=0.9"),
    ],
)
def test_other_optimizers_are_rejected(inner, received):
    with pytest.raises(ValueError, match=f"must be SGD without momentum.*{received}"):
        rs.DistributedOptimizer(inner, rs.CodedAdam())


def test_clipping_of_updates_is_rejected():
    with pytest.raises(ValueError, match="CodedAdam, which are updates.*'clipnorm': 1.0"):
        rs.DistributedOptimizer(tf_keras.optimizers.SGD(0.1, clipnorm=1.0), rs.CodedAdam())


def test_mixtures_with_unadapted_methods_are_rejected():
    rule = rs.Rule(pattern="embedding", method=rs.Dense())
    with pytest.raises(ValueError, match="Received: CodedAdam, Dense"):
        rs.Policy(default=rs.CodedAdam(), rules=[rule])
    with pytest.raises(ValueError, match="exchange gradients.*Received: CodedAdam"):
        rs.BitBudget(default=rs.CodedAdam())
    with pytest.raises(ValueError, match="updates of Adam.*Received: CodedAdam"):
        rs.Auto(candidates=(rs.CodedAdam(),))


@pytest.mark.parametrize(
    "options",
    [{"density": 0.0}, {"beta_2": 1.0}, {"epsilon": 0.0}, {"value_bits": 7},
     {"small_density": None}, {"average_every": -1}],
)  # fmt: skip
def test_bad_input(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"`{name}`.*Received: {name}={value!r}"):
        rs.CodedAdam(**options)
