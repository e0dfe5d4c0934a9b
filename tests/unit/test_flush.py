"""`flush` delivers all residuals."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_redsync as rs
from tests import total_state
from tests.loops import loop
from tf_redsync.callbacks import Flush

RATE, STEPS = 0.5, 4
SHAPES = {"kernel": (30, 20), "bias": (20,)}


def grads_of(number):
    draw = np.random.default_rng(number).standard_normal
    return [[np.float32(draw(s)) for s in SHAPES.values()] for _ in range(2)]


def train(strategy, family, method, steps=STEPS):
    """Returns variables and optimizer after some steps of given gradients on two replicas."""
    kinds = {keras: keras.Variable, tf_keras: tf.Variable}
    with strategy.scope(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        variables = [kinds[family](np.zeros(s, np.float32), name=n) for n, s in SHAPES.items()]
        optimizer = rs.DistributedOptimizer(family.optimizers.SGD(RATE), method)
        optimizer.build(variables)

    @tf.function
    def step(grads):
        strategy.run(
            lambda *own: optimizer.apply_gradients(zip(own, variables, strict=True)), grads
        )

    for number in range(steps):
        both = grads_of(number)
        step(
            tuple(
                strategy.experimental_distribute_values_from_function(
                    lambda ctx, i=i: tf.constant(both[ctx.replica_id_in_sync_group][i])  # noqa: B023
                )
                for i in range(len(variables))
            )
        )
    return variables, optimizer


def as_array(variable):
    return np.array(tf.convert_to_tensor(variable))


def pending(optimizer):
    state = total_state.total(optimizer.exchange)
    return sum(np.abs(v).sum() for n, v in state.items() if "residual" in n or "pending" in n)


def dense_update(method):
    """Returns the total update of dense training before the learning rate, in numpy."""
    m = method.traits.momentum_in_exchange
    totals, velocity = [np.zeros(s) for s in SHAPES.values()], [0.0, 0.0]
    for number in range(STEPS):
        for i, own in enumerate(zip(*grads_of(number), strict=True)):
            velocity[i] = m * velocity[i] + sum(own)
            totals[i] = totals[i] + velocity[i]
    return totals


@loop(
    ("family", "method"),
    [
        (keras, rs.TopK(density=0.05, dense_below=0)),
        (keras, rs.RedSync(density=0.05, dense_below=0, momentum=0.9, masking=False)),
        (tf_keras, rs.CodedTopK(density=0.05, momentum=0.9, masking=False)),
    ],
)
def test_all_gradients_are_delivered(mirrored, family, method):
    strategy = mirrored(2)
    variables, optimizer = train(strategy, family, method)
    before = pending(optimizer)
    assert before > 10
    optimizer.flush()
    assert pending(optimizer) == 0 and int(optimizer.exchange.step.numpy()) == STEPS + 1
    for variable, total in zip(variables, dense_update(method), strict=True):
        np.testing.assert_allclose(as_array(variable), -RATE * total, rtol=1e-4, atol=1e-4)
    kept = [as_array(v) for v in variables]
    optimizer.flush()  # all residuals are empty
    for variable, value in zip(variables, kept, strict=True):
        np.testing.assert_array_equal(as_array(variable), value)


def test_dense_exchange_has_no_residuals(mirrored):
    variables, optimizer = train(mirrored(2), keras, rs.Dense(momentum=0.9))
    before = [as_array(v) for v in variables]
    optimizer.flush()
    assert int(optimizer.exchange.step.numpy()) == STEPS
    for variable, value in zip(variables, before, strict=True):
        np.testing.assert_array_equal(as_array(variable), value)


def test_flush_before_the_first_step():
    optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.1), rs.TopK())
    with pytest.raises(RuntimeError, match="`flush` must follow training"):
        optimizer.flush()


@loop("family", [keras, tf_keras])
def test_fit_flushes_at_its_end(mirrored, family):
    with mirrored(2).scope(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        layers = [family.layers.Input((30,)), family.layers.Dense(20)]
        model = family.Sequential(layers)
        method = rs.TopK(density=0.05, dense_below=0)
        model.compile(rs.DistributedOptimizer(family.optimizers.SGD(0.01), method), "mse")
    x, y = np.ones((16, 30), "float32"), np.ones((16, 20), "float32")
    model.fit(x, y, batch_size=8, verbose=0)
    assert pending(model.optimizer) > 0
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[Flush()])
    assert pending(model.optimizer) == 0
    plain = family.Sequential([family.layers.Input((3,)), family.layers.Dense(1)])
    plain.compile("sgd", "mse")
    with pytest.raises(ValueError, match="`Flush` needs a model.*DistributedOptimizer"):
        plain.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0, callbacks=[Flush()])


def test_momenta_are_rejected_before_the_training(mirrored):
    with mirrored(2).scope():
        model = keras.Sequential([keras.layers.Input((30,)), keras.layers.Dense(20)])
        method = rs.contrib.OneBitAdam(warm_up=rs.DenseWarmUp(1))
        model.compile(rs.DistributedOptimizer(keras.optimizers.Adam(), method), "mse")
    x, y = np.ones((16, 30), "float32"), np.ones((16, 20), "float32")
    with pytest.raises(ValueError, match=r"Received: the callback Flush\(\). Remove it."):
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[Flush()])
    assert int(tf.convert_to_tensor(model.optimizer.iterations)) == 0


@loop("family", [keras, tf_keras])
def test_flush_keeps_the_average_of_the_weights(mirrored, family):
    """Keras assigns it before callbacks' `on_train_end`, in which `Flush` takes its step."""
    with mirrored(2).scope(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model = family.Sequential([family.layers.Input((30,)), family.layers.Dense(20)])
        inner = family.optimizers.SGD(0.01, use_ema=True, ema_momentum=0.9)
        model.compile(rs.DistributedOptimizer(inner, rs.TopK(density=0.05, dense_below=0)), "mse")
    x, y = np.ones((16, 30), "float32"), np.ones((16, 20), "float32")
    if family is keras:  # tf_keras rejects this; there are no averages yet
        model.fit(x, y, batch_size=8, epochs=0, verbose=0, callbacks=[Flush()])
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[Flush()])
    assert pending(model.optimizer) == 0
    for weight, average in zip(
        model.trainable_variables, inner._model_variables_moving_average, strict=True
    ):
        np.testing.assert_array_equal(as_array(weight), as_array(average))


def test_frozen_layers_stay(mirrored):
    with mirrored(2).scope():
        layers = [keras.layers.Dense(20), keras.layers.Dense(20)]
        model = keras.Sequential([keras.layers.Input((30,)), *layers])
        method = rs.TopK(density=0.05, dense_below=0)
        optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9), method)
        model.compile(optimizer, "mse")
    model.fit(np.ones((16, 30), "f4"), np.ones((16, 20), "f4"), batch_size=8, verbose=0)
    waiting = pending(optimizer)
    layers[0].trainable = False
    kept, moved = (layer.get_weights()[0] for layer in layers)
    optimizer.flush()
    np.testing.assert_array_equal(layers[0].get_weights()[0], kept)
    assert (layers[1].get_weights()[0] != moved).any()
    assert 0 < pending(optimizer) < waiting
    layers[0].trainable = True
    optimizer.flush()
    assert (layers[0].get_weights()[0] != kept).any() and pending(optimizer) == 0


class TwoOptimizers(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        for layer, optimizer in zip(self.layers[1:], (self.optimizer, self.other), strict=True):
            weights = layer.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def test_fit_flushes_all_optimizers_of_a_model(mirrored):
    with mirrored(2).scope():
        inputs = keras.layers.Input((30,))
        model = TwoOptimizers(inputs, keras.layers.Dense(20)(keras.layers.Dense(20)(inputs)))
        method = rs.TopK(density=0.05, dense_below=0)
        both = [rs.DistributedOptimizer(keras.optimizers.SGD(0.01), method) for _ in range(2)]
        for layer, optimizer in zip(model.layers[1:], both, strict=True):
            optimizer.build(layer.trainable_variables)
        optimizer, model.other = both
        model.compile(optimizer)
    x, y = np.ones((16, 30), "float32"), np.ones((16, 20), "float32")
    model.fit(x, y, batch_size=8, verbose=0)
    assert all(pending(optimizer) > 0 for optimizer in both)
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[Flush()])
    assert [pending(optimizer) for optimizer in both] == [0, 0]


def test_only_the_first_disable_flushes_a_delayed_exchange(mirrored, monkeypatch):
    _, optimizer = train(mirrored(2), keras, rs.TopK(density=0.05, dense_below=0))
    monkeypatch.setattr(optimizer.exchange.schedule, "delay", 1)  # as that of `CDSGD`
    for _ in range(2):
        optimizer.disable()
        assert int(optimizer.exchange.step.numpy()) == STEPS + 1
