"""Keras optimizers on replicas of one process: density 1 equals the unwrapped optimizer."""

import functools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_redsync as rs
from tests import total_state
from tests.deep import DEEP
from tests.loops import loop

KERAS = {"keras": keras, "tf_keras": tf_keras}
WIDTH, CLASSES, BATCH, STEPS = 12, 5, 8, 4


def make_optimizer(library, name):
    # The epsilon keeps Adam away from 0/0, where rounding decides the sign of a step.
    return {
        "sgd": lambda: library.optimizers.SGD(0.1),
        "momentum": lambda: library.optimizers.SGD(0.05, momentum=0.9),
        "nesterov": lambda: library.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
        "adam": lambda: library.optimizers.Adam(0.01, epsilon=1e-3),
        "legacy_sgd": lambda: tf_keras.optimizers.legacy.SGD(0.1),
        "legacy_adam": lambda: tf_keras.optimizers.legacy.Adam(0.01, epsilon=1e-3),
    }[name]()


def send_everything(**options):
    """Returns a RedSync that sends all elements of all matrices."""
    return rs.RedSync(density=1.0, dense_below=0, **options)


def make_model(library):
    library.utils.set_random_seed(3)
    layers = library.layers
    model = library.Sequential(
        [layers.Input((WIDTH,)), layers.Dense(16, activation="tanh"), layers.Dense(CLASSES)]
    )
    return model


def data():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((STEPS, 2, BATCH, WIDTH)).astype("f4")  # [step, replica, row, column]
    return x, rng.integers(0, CLASSES, (STEPS, 2, BATCH))


def train(strategy, library, optimizer, poison=None, steps=STEPS, note=None):
    """A custom loop; returns the model and, per step, each replica's weights.

    `note` is called with the optimizer after each step.
    """
    with strategy.scope():
        model = make_model(library)
        optimizer = optimizer()
        if hasattr(optimizer, "build"):  # the plain legacy ones have none
            optimizer.build(model.trainable_variables)
    loss_of = tf.nn.sparse_softmax_cross_entropy_with_logits
    x, y = data()

    @tf.function
    def step(inputs, labels):
        def replica(inputs, labels):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(loss_of(labels, model(inputs))) / 2
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

        strategy.run(replica, args=(inputs, labels))

    history = []
    for number in range(steps):
        inputs = x[number].copy()
        if number == poison:
            inputs[1, 0, 0] = np.nan  # on one replica only
        step(per_replica(strategy, inputs), per_replica(strategy, y[number]))
        history.append(weights(strategy, model))
        if note:
            note(optimizer)
    return model, optimizer, history


@functools.cache
def plain_history(strategy, library, name):
    """Returns the weights of the unwrapped optimizer."""
    return train(strategy, library, lambda: make_optimizer(library, name))[2]


def per_replica(strategy, rows):
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(rows[context.replica_id_in_sync_group])
    )


def weights(strategy, model):
    """Returns [replica][variable]; fails if the replicas differ."""
    local = [
        [w.numpy() for w in strategy.experimental_local_results(getattr(v, "value", v))]
        if not callable(getattr(v, "value", None))
        else [w.numpy() for w in strategy.experimental_local_results(v)]
        for v in model.trainable_variables
    ]
    assert all(len(parts) == strategy.num_replicas_in_sync for parts in local)
    for first, *others in local:
        for other in others:
            assert other.tobytes() == first.tobytes(), "replicas have different weights"
    return [parts[0] for parts in local]


def assert_close(found, expected):
    for step_found, step_expected in zip(found, expected, strict=True):
        for a, b in zip(step_found, step_expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


@loop(
    ("library", "name"),
    [
        ("keras", "nesterov"), ("keras", "adam"), ("tf_keras", "adam"), ("tf_keras", "legacy_sgd"),
        *([
            ("keras", "sgd"), ("keras", "momentum"), ("tf_keras", "sgd"), ("tf_keras", "momentum"),
            ("tf_keras", "legacy_adam"),
        ] if DEEP else []),
    ],
)  # fmt: skip
def test_density_one_equals_the_plain_optimizer(mirrored, library, name):
    strategy, library = mirrored(2), KERAS[library]
    plain = plain_history(strategy, library, name)
    _, optimizer, found = train(
        strategy,
        library,
        lambda: rs.DistributedOptimizer(make_optimizer(library, name), send_everything()),
    )
    assert_close(found, plain)
    assert not np.allclose(plain[0][0], plain[-1][0])
    assert optimizer.exchange.step.numpy() == STEPS and optimizer.exchange.skipped.numpy() == 0
    assert optimizer.iterations.numpy() == STEPS
    assert optimizer.bytes_per_step() == optimizer.exchange.bytes_sent.numpy() > 0


def test_sparse_totals_with_a_schedule(mirrored):
    """Keras passes each replica's value of a schedule to the update; the first rates differ."""
    strategy, rates = mirrored(2), [0.05, 0.1]

    def optimizer(rate):
        return rs.DistributedOptimizer(keras.optimizers.SGD(rate), rs.CodedGMC(momentum=0.9))

    def assign_rate(inner):
        inner.learning_rate = rates[1]

    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0], rates)
    _, _, expected = train(strategy, keras, lambda: optimizer(rates[0]), note=assign_rate)
    _, _, found = train(strategy, keras, lambda: optimizer(schedule))
    assert_close(found, expected)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("kind", ["redsync", "dense"])
def test_momentum_in_the_exchange_equals_momentum_in_the_optimizer(mirrored, kind, nesterov):
    """Heavy ball: scaling the gradient or the velocity by the rate is equivalent."""
    strategy = mirrored(2)
    if kind == "redsync":
        method = send_everything(momentum=0.9, nesterov=nesterov)  # without masking
    else:
        method = rs.Dense(momentum=0.9, nesterov=nesterov)
    expected = plain_history(strategy, keras, "nesterov" if nesterov else "momentum")
    _, _, found = train(
        strategy, keras, lambda: rs.DistributedOptimizer(keras.optimizers.SGD(0.05), method)
    )
    assert_close(found, expected)


def slots(optimizer):
    variables = optimizer.variables
    return [np.array(v.numpy()) for v in (variables() if callable(variables) else variables)]


@pytest.mark.parametrize(
    ("library", "name"),
    [("keras", "momentum"), ("keras", "adam"), ("tf_keras", "adam"), ("tf_keras", "legacy_adam")],
)
def test_nonfinite_step_changes_no_weight_and_no_slot(mirrored, library, name):
    strategy, library = mirrored(2), KERAS[library]
    method = rs.RedSync(density=0.1, dense_below=0)

    def wrapped():
        return rs.DistributedOptimizer(make_optimizer(library, name), method)

    seen = []

    def note(optimizer):
        seen.append((slots(optimizer), total_state.total(optimizer.exchange)))

    _, optimizer, history = train(strategy, library, wrapped, poison=2, steps=3, note=note)
    for a, b in zip(history[1], history[2], strict=True):
        np.testing.assert_array_equal(a, b)
    _, (before, state), (after, state_after) = seen
    for a, b in zip(before, after, strict=True):
        if a.shape == ():  # iterations, learning rate and the like
            continue
        np.testing.assert_array_equal(a, b)
    assert any(np.any(a) for n, a in state.items() if "residual" in n)
    for key in state:
        if key not in ("step", "skipped"):
            np.testing.assert_array_equal(state[key], state_after[key])
    assert optimizer.exchange.skipped.numpy() == 1 and optimizer.exchange.step.numpy() == 3


def compile_model(strategy, optimizer, **options):
    with strategy.scope():
        model = make_model(keras)
        model.compile(
            optimizer=optimizer(),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            **options,
        )
    return model


def rows():
    x, y = data()
    return x.reshape(-1, WIDTH), y.reshape(-1)


@pytest.mark.parametrize("workers", [2, *(pytest.param(n, marks=pytest.mark.deep) for n in (1, 3))])
def test_fit_evaluate_and_predict(mirrored, workers):
    """The last batch is uneven; Keras evaluates even ones itself."""
    strategy, (x, y) = mirrored(workers), (a[:61] for a in rows())
    histories = []
    for method in (None, send_everything()):

        def optimizer(method=method):
            inner = keras.optimizers.Adam(0.01, epsilon=1e-3)
            return rs.DistributedOptimizer(inner, method) if method else inner

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            model = compile_model(strategy, optimizer)
            history = model.fit(x, y, batch_size=24, epochs=1, shuffle=False, verbose=0).history
        weights(strategy, model)
        evaluated = model.evaluate(x[:48], y[:48], batch_size=24, verbose=0)
        predicted = model.predict(x[:48], batch_size=24, verbose=0)
        histories.append([*history["loss"], evaluated, predicted.sum()])
    np.testing.assert_allclose(histories[1], histories[0], rtol=1e-4, atol=1e-4)


def test_dense_warm_up_in_fit(mirrored):
    """Replicas of one process run both exchanges and keep one; `tf.cond` needs a single replica."""
    strategy, (x, y) = mirrored(2), rows()
    losses = []
    for direct in (True, False):
        model = compile_model(
            strategy,
            lambda direct=direct: rs.DistributedOptimizer(
                keras.optimizers.SGD(0.1),
                rs.RedSync(density=0.05, dense_below=0, warm_up=rs.DenseWarmUp(2)),
                direct_collectives=direct,
            ),
        )
        optimizer, sent = model.optimizer, []

        def note(batch, logs, optimizer=optimizer, sent=sent):
            sent.append(float(optimizer.exchange.bytes_sent.numpy()))

        log = keras.callbacks.LambdaCallback(on_train_batch_end=note)
        fit = model.fit(x, y, batch_size=16, shuffle=False, verbose=0, callbacks=[log])
        losses.append(fit.history["loss"])
        weights(strategy, model)
        if direct:
            dense = optimizer.explain().dense_bytes
            assert sent[:2] == [dense, dense]
            assert sent[2:] == [optimizer.bytes_per_step()] * 2 and sent[2] < dense / 4
    np.testing.assert_array_equal(losses[0], losses[1])


def test_jit_compile_is_rejected_before_training(mirrored):
    x, y = rows()
    for workers in (1, 2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            model = compile_model(
                mirrored(workers),
                lambda: rs.DistributedOptimizer(keras.optimizers.SGD(0.1), rs.Dense()),
                jit_compile=True,
            )
            before = model.get_weights()
            with pytest.raises(ValueError, match="`jit_compile=True` is not supported.*Received"):
                model.fit(x, y, batch_size=16, verbose=0)
        for a, b in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(a, b)
