"""AutoGraph converts the user's functions but not those of this package."""

import traceback

import keras
import pytest
import tensorflow as tf

import tf_redsync as rs
from tf_redsync import autograph


def generated(frames):
    """Returns the functions of a stack whose code AutoGraph has generated."""
    return {f.name for f in frames if "__autograph_generated" in f.filename}


class RecordingRate(keras.optimizers.schedules.LearningRateSchedule):
    """A constant learning rate that records its call stack."""

    def __init__(self):
        self.frames = []

    def __call__(self, step):
        self.frames += traceback.extract_stack()
        return 0.1


def test_step_converts_only_user_functions():
    rate = RecordingRate()
    strategy = rs.MultiWorkerMirroredStrategy()
    with strategy.scope():
        weight = tf.Variable([1.0])
        optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(rate), rs.Dense())
        optimizer.build([weight])
    rate.frames = []

    def replica_step(x):
        optimizer.apply([x], [weight])

    @tf.function
    def step(x):
        strategy.run(replica_step, args=(x,))

    step(tf.ones([1]))
    assert generated(rate.frames) == {"tf__replica_step"}
    assert weight.numpy() == pytest.approx(0.9)


def branching(x):
    if x > 0.0:
        return x
    return -x


def test_as_called_converts_if_autograph_is_enabled():
    def step(x):
        return autograph.as_called(branching)(x)

    assert tf.function(step)(tf.constant(-2.0)) == 2.0
    assert step(tf.constant(-2.0)) == 2.0
    with pytest.raises(TypeError, match="symbolic"):
        tf.function(step, autograph=False)(tf.constant(-2.0))


def test_rule_is_added_once():
    from tensorflow.python.autograph.core import config

    before = config.CONVERSION_RULES
    autograph.leave_alone("tf_redsync")
    assert config.CONVERSION_RULES == before
    assert [str(rule) for rule in before].count(str(before[0])) == 1
