"""`compile` of a model: its scope, and a method in place of an optimizer."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs


def model():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


@pytest.mark.parametrize("wrong", [rs.TopK(), rs.CodedGMC])
@pytest.mark.parametrize("by_name", [True, False])
def test_a_method_in_place_of_an_optimizer(wrong, by_name):
    given = ((), {"optimizer": wrong}) if by_name else ((wrong,), {})
    with pytest.raises(TypeError, match="`optimizer`.*DistributedOptimizer"):
        model().compile(*given[0], **given[1], loss="mse")


def test_compile_outside_of_the_scope():
    """Metrics are of the strategy's replicas all the same."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        inside = model()
        inside.compile(rs.DistributedOptimizer(keras.optimizers.SGD(0.1), rs.Dense()), "mse")
        made = model()
    made.compile(rs.DistributedOptimizer(keras.optimizers.SGD(0.1), rs.Dense()), "mse")
    kinds = [{type(v.value) for v in m.metrics[0].variables} for m in (inside, made)]
    assert kinds[0] == kinds[1] and kinds[0] != {type(tf.Variable(0.0))}
    alone = model()
    alone.compile("sgd", "mse")
    assert np.isfinite(alone.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0).history["loss"][0])
