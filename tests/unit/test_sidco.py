"""SIDCo: achieved density on several distributions, misleading inputs, stages, capacity."""

import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from tests.deep import DEEP
from tests.loops import loop
from tests.oracle.sidco import gamma_quantile, lower_gamma, threshold_numpy
from tf_redsync.contrib.sidco import DISTRIBUTIONS
from tf_redsync.exchange import loopback
from tf_redsync.exchange.layout import BucketLayout, TensorSpec

SIZE = 100_000
SPEC = TensorSpec("w", (250, 400))
INPUTS = {
    "normal": lambda rng: rng.standard_normal(SIZE),
    "laplace": lambda rng: rng.laplace(size=SIZE),
    "student": lambda rng: rng.standard_t(3, SIZE),
    "generalised_normal": lambda rng: rng.gamma(2.0, size=SIZE) ** 2,  # exponent 1/2
    # Like a real gradient: normal, with a scale per element, and one third zeros.
    "mixture": lambda rng: (
        np.exp(rng.standard_normal(SIZE)) * rng.standard_normal(SIZE) * (rng.random(SIZE) < 0.67)
    ),
}
every_distribution = loop("distribution", DISTRIBUTIONS)


def run(method, gradient, steps, workers=1):
    """Runs steps of `workers` workers with `gradient(step)`; returns all of them."""
    layout = BucketLayout((SPEC,), workers)
    states, history = loopback.initial_states(method, layout), []
    for number in range(steps):
        grads = [[tf.constant(gradient(number).reshape(SPEC.shape), tf.float32)]] * workers
        history.append(loopback.run_step(method, layout, grads, states, number))
        states = history[-1].states
    return history


@pytest.mark.deep
@every_distribution
@loop("density", [0.01, 0.001] if DEEP else [0.001])  # the lower, the more stages
@loop("name", INPUTS)
def test_achieved_density(name, density, distribution):
    """Within 20 % of the target once the number of stages has converged."""
    rng, wanted = np.random.default_rng(5), density * SIZE
    method = rs.contrib.SIDCo(density=density, distribution=distribution, adapt_every=2)
    fit, ratios = method.init(BucketLayout((SPEC,), 1))["stages"][0], []
    for _ in range(24):
        values = tf.constant(np.abs(INPUTS[name](rng)), tf.float32)
        threshold, reached = method.threshold(SIZE, values, fit[0])
        assert float(reached) == np.count_nonzero(values >= threshold)
        ratios.append(float(reached) / wanted)
        fit = method.adapted(SIZE, fit, reached)
    assert 0.8 <= np.mean(ratios[-10:]) <= 1.2
    assert fit[0] <= method.max_stages(SIZE)


def test_achieved_density_with_error_feedback():
    """In training the residual changes the distribution: small elements accumulate."""
    rng = np.random.default_rng(6)
    method = rs.contrib.SIDCo(density=0.01)
    history = run(method, lambda step: INPUTS["student"](rng), 25)
    sent = [np.count_nonzero(step.totals[0][0]) / (0.01 * SIZE) for step in history]
    assert 0.8 <= np.mean(sent[-10:]) <= 1.2


@every_distribution
@loop("stages", [2, 3, 5])
def test_threshold_matches_numpy(distribution, stages):
    method = rs.contrib.SIDCo(density=0.004, distribution=distribution)
    for name, inputs in INPUTS.items():
        values = np.float32(np.abs(inputs(np.random.default_rng(7))))
        found, _ = method.threshold(SIZE, tf.constant(values), tf.constant(float(stages)))
        expected = threshold_numpy(values, 400, stages, distribution)
        assert float(found) == pytest.approx(expected, rel=1e-4), name


def test_gamma_quantile_of_the_oracle():
    """Shape 1 is the exponential, and shape 2 has a closed form as well."""
    assert gamma_quantile(1.0, 0.75) == pytest.approx(np.log(4))
    x = gamma_quantile(2.0, 0.9)
    assert 1 - np.exp(-x) * (1 + x) == pytest.approx(0.9)
    assert lower_gamma(0.5, 0.0) == 0.0


@every_distribution
@pytest.mark.parametrize("scale", [1e-30, 1e27])
def test_scale_has_no_effect(distribution, scale):
    """Squares of these values overflow or underflow float32."""
    values = INPUTS["laplace"](np.random.default_rng(8))
    method = rs.contrib.SIDCo(density=0.01, distribution=distribution)
    one = run(method, lambda step: values, 1)[0].totals[0][0]
    other = run(method, lambda step: scale * values, 1)[0].totals[0][0]
    assert np.mean(np.equal(one, 0) == np.equal(other, 0)) > 1 - 1e-4
    assert np.count_nonzero(other) > 0.005 * SIZE


@every_distribution
@loop(
    ("values", "low", "high"),
    [
        (np.zeros(SIZE), 0, 0),
        (np.full(SIZE, -0.5), 2000, 2000),  # no outliers: as many as a message holds
        (np.eye(1, SIZE, 777)[0], 1, 1),
        (np.where(np.arange(SIZE) < 30, 1.0, 0.0), 30, 30),
        (np.eye(1, SIZE, 5)[0] * 1e6 + 1.0, 1, 2000),
        (np.where(np.arange(SIZE) < 5000, 2.0, 1.0), 1, 2000),
    ],
)
def test_inputs_that_no_distribution_fits(values, low, high, distribution):
    method = rs.contrib.SIDCo(density=0.01, distribution=distribution)
    for step in run(method, lambda number: values, 3):
        assert step.finite and low <= np.count_nonzero(step.totals[0][0]) <= high


def test_missed_density_adds_a_stage_at_the_end_of_an_interval():
    method = rs.contrib.SIDCo(density=0.01, adapt_every=3)
    fit, stages = tf.constant([2.0, 0.0, 0.0]), []
    for reached in (1000, 1100, 1300, 1300, 1300, 1300, 900, 800, 600) + (0,) * 30:
        fit = method.adapted(SIZE, fit, tf.constant(float(reached)))
        stages.append(float(fit[0]))
    assert stages[:9] == [2, 2, 2, 2, 2, 3, 3, 3, 4]
    assert stages[-1] == method.max_stages(SIZE) == 7  # log2(100), rounded up


def test_elements_beyond_the_capacity_stay_in_the_residual():
    method = rs.contrib.SIDCo(density=0.01)
    assert method.describe(SPEC) == "generalized_pareto, about 1000 elements"
    values = np.random.default_rng(9).permutation(SIZE) + 1.0  # constant density: a bounded tail
    values[values > 0.9 * SIZE] = 2.0 * SIZE  # ten times the target at the very top
    (step,) = run(method, lambda number: values, 1)
    assert step.requests[0].message.shape == [2 + 2 * 2000]
    assert np.count_nonzero(step.totals[0][0]) == 2000
    assert np.count_nonzero(step.states[0]["residual"][0]) == SIZE - 2000


@pytest.mark.parametrize(
    "options", [{"density": 0.0}, {"distribution": "normal"}, {"adapt_every": 0}]
)
def test_bad_input(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"`{name}`.*Received: {name}={value!r}"):
        rs.contrib.SIDCo(**options)


def test_small_tensors_and_biases_are_rejected():
    assert "rank 1" in rs.contrib.SIDCo().refuses(TensorSpec("bias", (5000,)))
    assert "dense_below" in rs.contrib.SIDCo().refuses(TensorSpec("w", (31, 33)))
