"""The callback that `fit`, `evaluate` and `predict` insert first."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_redsync as rs
from tf_redsync.keras import fit_hook, training_length
from tf_redsync.keras.fit_hook import FitHook

EVENTS = (
    "on_train_begin",
    "on_epoch_begin",
    "on_test_begin",
    "on_epoch_end",
    "on_train_end",
    "on_predict_begin",
)


@pytest.mark.filterwarnings("ignore:tf_redsync. there is one worker")
@pytest.mark.parametrize("family", [keras, tf_keras], ids=["keras3", "tf_keras"])
def test_hook_precedes_user_callbacks(family, monkeypatch):
    seen = []
    for event in EVENTS:
        monkeypatch.setattr(FitHook, event, lambda self, *a, event=event, **k: seen.append(event))
    before = family.callbacks.LambdaCallback(on_epoch_begin=lambda *_: seen.append("user"))
    model = family.Sequential([family.layers.Input((3,)), family.layers.Dense(1)])
    model.compile(rs.DistributedOptimizer(family.optimizers.SGD(0.1), rs.Dense()), "mse")
    x, y = np.ones((4, 3), "float32"), np.ones((4, 1), "float32")
    model.fit(x, y, validation_data=(x, y), epochs=1, verbose=0, callbacks=[before])
    model.predict(x, verbose=0)
    expected = list(EVENTS)
    expected.insert(2, "user")
    assert seen == expected


def test_models_without_the_wrapper_have_no_hook():
    import tf_redsync.keras.keras3  # noqa: F401 - installs it

    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    found = keras.callbacks.CallbackList([], model=model).callbacks
    assert not any(isinstance(c, FitHook) for c in found)


@pytest.mark.filterwarnings("ignore:tf_redsync. there is one worker")
@pytest.mark.parametrize("family", [keras, tf_keras], ids=["keras3", "tf_keras"])
def test_callback_list_of_loop_without_params(family):
    model = family.Sequential([family.layers.Input((3,)), family.layers.Dense(1)])
    model.compile(rs.DistributedOptimizer(family.optimizers.SGD(0.1), rs.Dense()), "mse")
    metrics = rs.callbacks.CompressionMetrics(every=1, time_split=False)
    callbacks = family.callbacks.CallbackList([metrics], add_history=True, model=model)
    callbacks.on_train_begin()
    for epoch in range(2):
        callbacks.on_epoch_begin(epoch)
        callbacks.on_train_batch_begin(0)
        model.train_on_batch(np.ones((4, 3)), np.ones((4, 1)))
        callbacks.on_train_batch_end(0, {})
        callbacks.on_epoch_end(epoch, {})
    callbacks.on_train_end()
    assert model.history.history["compression_ratio"] == [1.0, 1.0]


def test_callback_list_of_loop_without_params_has_no_length(mirrored):
    with mirrored(2).scope():
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
        optimizer = rs.DistributedOptimizer(
            keras.optimizers.SGD(0.1), rs.TopK(), warm_up=rs.DenseWarmUp(steps=5)
        )
        model.compile(optimizer, "mse")
    callbacks = keras.callbacks.CallbackList([], model=model)
    callbacks.on_train_begin()
    callbacks.on_epoch_begin(0)
    model.train_on_batch(np.ones((4, 3)), np.ones((4, 1)))
    callbacks.on_epoch_end(0, {})
    assert not optimizer.exchange.length_checked
    training_length.forget(optimizer.exchange)  # the process would warn at its end


@pytest.mark.filterwarnings("ignore:tf_redsync. there is one worker")
@pytest.mark.parametrize("family", [keras, tf_keras], ids=["keras3", "tf_keras"])
def test_disable_retraces_train_on_batch(family):
    model = family.Sequential([family.layers.Input((3,)), family.layers.Dense(1)])
    model.compile(rs.DistributedOptimizer(family.optimizers.SGD(0.1), rs.TopK()), "mse")
    x, y = np.ones((4, 3), "float32"), np.ones((4, 1), "float32")
    for switch in (lambda: None, model.optimizer.disable, model.optimizer.enable):
        switch()
        model.train_on_batch(x, y)
    assert int(model.optimizer.exchange.step.numpy()) == 3


@pytest.mark.filterwarnings("ignore:tf_redsync. there is one worker")
@pytest.mark.parametrize("workers", [1, 2])
def test_tuned_steps_per_execution_need_one_worker(workers, monkeypatch):
    model = tf_keras.Sequential([tf_keras.layers.Input((3,)), tf_keras.layers.Dense(1)])
    optimizer = rs.DistributedOptimizer(tf_keras.optimizers.SGD(0.1), rs.Dense())
    model.compile(optimizer, "mse", steps_per_execution="auto")
    x, y = np.ones((4, 3), "float32"), np.ones((4, 1), "float32")
    if workers == 1:
        model.fit(x, y, verbose=0)
        return
    monkeypatch.setattr(fit_hook.strategies, "process_count", lambda strategy: workers)
    with pytest.raises(ValueError, match='`steps_per_execution`.*Received.*="auto"'):
        model.fit(x, y, verbose=0)


def test_running_method_ignores_user_functions():
    seen = []
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: seen.append(fit_hook.running_method())
    )
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0, callbacks=[note])

    def fit():
        return fit_hook.running_method()

    assert [*seen, fit()] == ["fit", ""]


class TwoOptimizers(keras.Model):
    """A layer that `optimizer` trains, and one that `second` trains."""

    def __init__(self, **of_second):
        super().__init__()
        self.layers_trained = [keras.layers.Dense(1), keras.layers.Dense(1)]
        first, self.second = (
            rs.DistributedOptimizer(keras.optimizers.SGD(0.1), rs.TopK(), **options)
            for options in ({}, of_second)
        )
        self.compile(first)
        for layer, optimizer in self.trained():
            layer.build((None, 3))
            optimizer.build(layer.trainable_variables)
        self.built = True

    def trained(self):
        return zip(self.layers_trained, (self.optimizer, self.second), strict=True)

    def call(self, x):
        return sum(layer(x) for layer in self.layers_trained)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        for layer, optimizer in self.trained():
            variables = layer.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


@pytest.mark.filterwarnings("ignore:tf_redsync. there is one worker")
def test_all_wrapped_optimizers_among_the_attributes_are_served():
    model = TwoOptimizers(warm_up=rs.DenseWarmUp(fraction=0.5))
    x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    model.fit(x, y, batch_size=2, epochs=2, verbose=0)
    assert model.second.exchange.warm_up.steps == 4
    model.second.disable()  # retraces the step
    model.fit(x, y, batch_size=2, verbose=0)
    model.second.exchange.skipped.assign(0)
    skip = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda *_: model.second.exchange.skipped.assign_add(3)
    )
    history = model.fit(x, y, verbose=0, callbacks=[skip])
    assert history.history["skipped_steps"] == [3]


@pytest.mark.filterwarnings("ignore:tf_redsync. there is one worker")
@pytest.mark.parametrize("family", [keras, tf_keras], ids=["keras3", "tf_keras"])
def test_work_between_steps_interrupts_the_schedule(family, monkeypatch, tmp_path):
    """`Auto` would count it as time of the step before."""
    model = family.Sequential([family.layers.Input((3,)), family.layers.Dense(1)])
    optimizer = rs.DistributedOptimizer(family.optimizers.SGD(0.1), rs.Dense())
    model.compile(optimizer, "mse")
    data = tf.data.Dataset.from_tensor_slices((np.ones((16, 3)), np.ones((16, 1)))).batch(4)
    model.fit(data, verbose=0)
    interrupted = []
    monkeypatch.setattr(
        optimizer.exchange.schedule,
        "interrupt",
        lambda: interrupted.append(int(optimizer.exchange.step.numpy())),
    )
    model.fit(data, epochs=2, verbose=0)
    assert interrupted == [8, 12]
    model.evaluate(data, verbose=0)
    model.predict(data, verbose=0)
    assert interrupted[2:] == [12, 12]
    model.fit(data, verbose=0, callbacks=[rs.callbacks.Checkpoint(tmp_path, every=2)])
    assert interrupted[4:] == [14, 16, 16]  # a save, the end of the epoch, and another save
