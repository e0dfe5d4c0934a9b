"""Warm-ups: stages, ends, config, bad input."""

import json

import numpy as np
import pytest

import tf_redsync as rs
from tests.loops import loop
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.methods import from_config, serialize


def test_dense_warm_up_is_read_by_redsync():
    assert rs.RedSync(warm_up=rs.DenseWarmUp(7)).sync_schedule.warm_up_steps == 7
    assert rs.RedSync().sync_schedule.warm_up_steps == 0
    assert rs.RedSync(warm_up=rs.ExponentialWarmUp(3)).sync_schedule.warm_up_steps == 0


def test_stages():
    ramp = rs.ExponentialWarmUp(2, (0.5, 0.1))
    assert [ramp.density(step, 0.01) for step in range(7)] == [0.5, 0.5, 0.1, 0.1, 0.01, 0.01, 0.01]
    assert ramp.density(2**62, 0.01) == 0.01


def test_ramp_does_not_undershoot():
    """A stage sparser than the final density would send less than the user requested."""
    ramp = rs.ExponentialWarmUp(1, (0.25, 0.0625, 0.015625))
    assert [ramp.density(step, 0.1) for step in range(4)] == [0.25, 0.1, 0.1, 0.1]


@pytest.mark.parametrize("final", [0.001, 0.1])
def test_k_is_equal_in_graph_and_eager_mode(final):
    """In graph mode the step is a tensor; both computations of k must agree at every step."""
    import tensorflow as tf

    method = rs.RedSync(density=final, warm_up=rs.ExponentialWarmUp(3, (0.25, 0.0625, 0.004)))
    layout = BucketLayout((TensorSpec("a", (123, 7)), TensorSpec("b", (1, 1))), 2)
    in_graph = tf.function(lambda step: method._k(layout, step))
    for step in (0, 2, 3, 5, 6, 8, 9, 10, 1000, 2**40):
        step = tf.constant(step, tf.int64)
        expected = method._k(layout, step)  # a list, where the step is known
        np.testing.assert_array_equal(in_graph(step), expected)
        density = method.warm_up.density(int(step), final)
        assert expected == [max(1, int(density * 861 + 0.5)), 1]


@pytest.mark.parametrize("schedule", [rs.DenseWarmUp(5), rs.ExponentialWarmUp(2, (0.5, 0.25))])
def test_config_round_trip(schedule):
    assert from_config(json.loads(json.dumps(serialize(schedule)))) == schedule


def test_lists_become_tuples():
    assert rs.ExponentialWarmUp(2, [0.5, 0.25]) == rs.ExponentialWarmUp(2, (0.5, 0.25))
    stages = rs.DensityStages([0, 5], [0.5, 0.25])
    assert stages == rs.DensityStages((0, 5), (0.5, 0.25)) and hash(stages) is not None


@pytest.mark.parametrize("steps", [0, -1, 2.5, None, "3"])
def test_bad_steps(steps):
    with pytest.raises(ValueError) as error:
        rs.DenseWarmUp(steps)
    assert f"`steps` must be an integer >= 1. Received: steps={steps!r}" in str(error.value)
    with pytest.raises(ValueError) as error:
        rs.ExponentialWarmUp(steps)
    assert "`steps_per_stage`" in str(error.value) and repr(steps) in str(error.value)


@loop("densities", [(), [], 0.5, (0.5, 0.0), (1.5,), (0.1, 0.2), ("a",), (float("nan"),), None])
def test_bad_densities(densities):
    with pytest.raises(ValueError, match="`densities`.*Received: densities="):
        rs.ExponentialWarmUp(10, densities)


@pytest.mark.parametrize("warm_up", [5, "dense", 0.5, {"steps": 3}])
def test_bad_warm_up(warm_up):
    with pytest.raises(ValueError) as error:
        rs.RedSync(warm_up=warm_up)
    assert "`warm_up` must be" in str(error.value) and f"warm_up={warm_up!r}" in str(error.value)
