"""Errors and warnings for a worker that would train alone although TF_CONFIG names others."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_redsync as rs

alone = pytest.mark.filterwarnings("ignore:tf_redsync. there is one worker")
FAMILIES = {
    "keras3": (keras, lambda: keras.optimizers.SGD(0.1)),
    "tf_keras": (tf_keras, lambda: tf_keras.optimizers.SGD(0.1)),
    "legacy": (tf_keras, lambda: tf_keras.optimizers.legacy.SGD(0.1)),
}


def config(task="worker", **cluster):
    return json.dumps({"cluster": cluster, "task": {"type": task, "index": 0}})


TWO = config(worker=["a:1", "b:1"])


def fit(family):
    library, inner = FAMILIES[family]
    model = library.Sequential([library.layers.Input((3,)), library.layers.Dense(1)])
    model.compile(
        optimizer=rs.DistributedOptimizer(inner(), rs.Dense()),
        loss=library.losses.MeanSquaredError(),
    )
    model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
    return model


def custom_loop(family):
    weight = tf.Variable([1.0]) if family != "keras3" else keras.Variable([1.0])
    optimizer = rs.DistributedOptimizer(FAMILIES[family][1](), rs.Dense())
    optimizer.apply_gradients([(tf.constant([1.0]), weight)])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("train", [fit, custom_loop])
@pytest.mark.parametrize("text", [TWO, config("chief", chief=["a:1"], worker=["b:1"])])
def test_missing_strategy_raises(monkeypatch, family, train, text):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ValueError, match="TF_CONFIG names 2 workers") as error:
        train(family)
    assert "there is no MultiWorkerMirroredStrategy" in str(error.value)
    assert "with strategy.scope():" in str(error.value)


def test_strategy_of_one_worker_raises(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", TWO)
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        with pytest.raises(ValueError, match="strategy=MirroredStrategy"):
            fit("keras3")


@alone
@pytest.mark.parametrize(
    "text",
    [
        "",
        "not JSON",
        "[]",
        config(worker=["a:1"]),
        config("evaluator", worker=["a:1", "b:1"], evaluator=["c:1"]),
        config("chief", chief=["a:1"], worker=["b:1"], ps=["c:1"]),
        config("ps", worker=["a:1", "b:1"], ps=["c:1"]),
        json.dumps({"cluster": {"worker": ["a:1", "b:1"]}}),
    ],
)
def test_single_worker_only_warns(monkeypatch, text):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.warns(UserWarning, match="there is one worker"):
        custom_loop("keras3")


def test_variables_of_another_scope():
    weight, strategy = (
        tf.Variable([1.0], name="mine"),
        tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
    )
    optimizer = rs.DistributedOptimizer(tf_keras.optimizers.SGD(0.1), rs.Dense())
    with strategy.scope(), pytest.raises(ValueError, match="mine.*strategy's scope"):
        optimizer.build([weight])


@pytest.mark.parametrize(
    ("family", "suffix"),
    [("keras3", ".keras"), ("tf_keras", ".keras"), ("tf_keras", ".h5"), ("legacy", ".h5")],
)
def test_loaded_model_predicts_but_does_not_train(monkeypatch, tmp_path, family, suffix):
    library = FAMILIES[family][0]
    path, x = str(tmp_path / f"model{suffix}"), np.ones((4, 3), np.float32)
    with pytest.warns(UserWarning, match="there is one worker"):
        model = fit(family)
    model.save(path)
    monkeypatch.setenv("TF_CONFIG", TWO)
    loaded = library.models.load_model(path)
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
    assert loaded.evaluate(x, np.ones((4, 1)), verbose=0) > 0
    assert int(loaded.optimizer.iterations.numpy()) == 1
    with pytest.raises(ValueError, match="TF_CONFIG names 2 workers") as error:
        loaded.fit(x, np.ones((4, 1)), verbose=0)
    for word in ("load_model", "compile=False", "strategy.scope()"):
        assert word in str(error.value)
    with pytest.raises(ValueError, match="TF_CONFIG names 2 workers"):
        loaded.optimizer.build(loaded.trainable_variables)
