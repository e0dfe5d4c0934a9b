"""`Model.compile`: its scope, its arguments, and a method instead of an optimizer."""

import linecache
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from tf_redsync.keras import consistency


def model():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


@pytest.mark.parametrize("wrong", [rs.TopK(), rs.CodedGMC])
@pytest.mark.parametrize("by_name", [True, False])
def test_method_instead_of_an_optimizer(wrong, by_name):
    given = ((), {"optimizer": wrong}) if by_name else ((wrong,), {})
    with pytest.raises(TypeError, match="`optimizer`.*DistributedOptimizer"):
        model().compile(*given[0], **given[1], loss="mse")


@pytest.mark.filterwarnings("ignore:tf_redsync. there is one worker")
def test_no_xla_unless_asked_for(monkeypatch):
    """On a GPU and without a strategy, Keras compiles by XLA if the argument is "auto"."""
    monkeypatch.setattr(keras.Model, "_resolve_auto_jit_compile", lambda self: True)
    for options in ({}, {"jit_compile": "auto"}):
        alone = model()
        alone.compile(
            rs.DistributedOptimizer(keras.optimizers.SGD(0.1), rs.Dense()), "mse", **options
        )
        assert alone.jit_compile is False and not alone.get_compile_config()["jit_compile"]
        alone.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
    plain = model()
    plain.compile("sgd", "mse")
    assert plain.jit_compile is True


def test_compile_outside_the_scope():
    """Metrics still belong to the strategy's replicas."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        inside = model()
        inside.compile(rs.DistributedOptimizer(keras.optimizers.SGD(0.1), rs.Dense()), "mse")
        compiled = model()
    compiled.compile(rs.DistributedOptimizer(keras.optimizers.SGD(0.1), rs.Dense()), "mse")
    kinds = [{type(v.value) for v in m.metrics[0].variables} for m in (inside, compiled)]
    assert kinds[0] == kinds[1] and kinds[0] != {type(tf.Variable(0.0))}
    alone = model()
    alone.compile("sgd", "mse")
    assert np.isfinite(alone.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0).history["loss"][0])


def comparison_text(**arguments):
    """Returns the text by which workers compare a model's `compile` arguments."""
    seen = []
    one = model()
    one.compile("sgd", **arguments)
    with mock.patch.object(consistency.agreement, "agree", lambda _, text: seen.append(text)):
        consistency.compare_compile(one)
    return seen[0]


def squared(y, p):
    return (y - p) ** 2


def absolute(y, p):
    return abs(y - p)


class Unsaved(keras.losses.Loss):
    """A loss that cannot be serialized."""

    def get_config(self):
        raise NotImplementedError


COMPILED = [
    lambda: {"loss": "mse"},
    lambda: {"loss": "mae"},
    lambda: {"loss": squared},
    lambda: {"loss": absolute},
    lambda: {"loss": keras.losses.Huber(0.5)},
    lambda: {"loss": keras.losses.Huber(1.5)},
    lambda: {"loss": Unsaved()},
    lambda: {"loss": "mse", "loss_weights": 2.0},
    lambda: {"loss": "mse", "metrics": ["mae"]},
    lambda: {"loss": "mse", "metrics": ["mse"]},
    lambda: {"loss": "mse", "metrics": [keras.metrics.MeanMetricWrapper(squared)]},
    lambda: {"loss": "mse", "metrics": [keras.metrics.TopKCategoricalAccuracy(1)]},
    lambda: {"loss": "mse", "metrics": [keras.metrics.TopKCategoricalAccuracy(2)]},
    lambda: {"loss": "mse", "weighted_metrics": ["mae"]},
    lambda: {"loss": "mse", "run_eagerly": True},
]


def test_workers_compare_losses_and_metrics():
    """Equal arguments give equal texts, different arguments different ones."""
    texts = [comparison_text(**make()) for make in COMPILED]
    assert texts == [comparison_text(**make()) for make in COMPILED]
    assert len(set(texts)) == len(COMPILED), texts


def test_functions_of_one_name_are_compared_by_source():
    sources = ("def loss(y, p):\n    return y - p\n", "def loss(y, p):\n    return p - y\n")
    texts = []
    for number, source in enumerate(sources):
        file = f"<cell {number}>"
        linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
        names = {}
        exec(compile(source, file, "exec"), names)
        texts.append(comparison_text(loss=names["loss"]))
    assert texts[0] != texts[1]


def test_model_with_its_own_compile():
    """An override of `compile` may forward any arguments."""

    class Own(keras.Sequential):
        def compile(self, own_loss):
            super().compile("sgd")

    one = Own([keras.Input((3,)), keras.layers.Dense(1)])
    one.compile(squared)
    consistency.compare_compile(one)
