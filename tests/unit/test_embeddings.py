"""Embeddings with Keras 3's adaptive optimizers: the wrappers follow the formulas.

If a batch looks a row up twice, its gradient has two slices. Keras 3's own update squares each
slice and sums the squares. The formula and the wrapper square the sum.
"""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_redsync as rs

ROWS, WIDTH, STEPS, RATE = 5, 3, 4, 0.1
# Lookups of the two replicas: row 0 twice by one of them, row 1 by both, row 4 by none.
IDS = np.array([[0, 0, 1], [1, 2, 3]])


def factor(step, replica):
    """Returns the factor of each looked-up value in the loss."""
    generator = np.random.default_rng(10 * step + replica)
    return generator.standard_normal((3, WIDTH)).astype(np.float32)


def adam(g, state, t):
    state["m"] = 0.9 * state["m"] + 0.1 * g
    state["v"] = 0.999 * state["v"] + 0.001 * g**2
    rate = RATE * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    return rate * state["m"] / (np.sqrt(state["v"]) + 1e-7)


def rmsprop(g, state, t):
    state["v"] = 0.9 * state["v"] + 0.1 * g**2
    return RATE * g / np.sqrt(state["v"] + 1e-7)


def adagrad(g, state, t):
    state["m"] += g**2  # initial accumulator
    return RATE * g / np.sqrt(0.1 + state["m"] + 1e-7)


FORMULAS = {"Adam": adam, "RMSprop": rmsprop, "Adagrad": adagrad}


def by_numpy(formula):
    weights = np.zeros((ROWS, WIDTH))
    state = {"m": np.zeros_like(weights), "v": np.zeros_like(weights)}
    for step in range(STEPS):
        gradient = np.zeros_like(weights)
        for replica, ids in enumerate(IDS):
            np.add.at(gradient, ids, factor(step, replica))
        weights = weights - formula(gradient, state, step + 1)
    return weights


def by_keras(name, wrap, strategy):
    with strategy.scope(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # density 1 saves no bytes
        table = keras.layers.Embedding(ROWS, WIDTH, embeddings_initializer="zeros")
        table.build()
        optimizer = wrap(getattr(keras.optimizers, name)(RATE))
        optimizer.build(table.trainable_variables)
    replicas = strategy.num_replicas_in_sync

    def replica_step(ids, factors):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(table(ids) * factors)
        gradients = tape.gradient(loss, table.trainable_variables)
        assert isinstance(gradients[0], tf.IndexedSlices)
        optimizer.apply(gradients, table.trainable_variables)

    run = tf.function(lambda *batch: strategy.run(replica_step, batch))
    for step in range(STEPS):
        factors = np.stack([factor(step, replica) for replica in range(len(IDS))])
        parts = [np.split(array, replicas) for array in (IDS, factors)]
        run(
            *(
                strategy.experimental_distribute_values_from_function(
                    lambda c, part=part: tf.constant(part[c.replica_id_in_sync_group])
                )
                for part in parts
            )
        )
    return np.asarray(table.embeddings.numpy())


@pytest.mark.parametrize(
    ("method", "name"),
    [
        *((rs.RedSync(density=1.0), name) for name in FORMULAS),
        (rs.Dense(), "Adam"),
        *(pytest.param(rs.Dense(), n, marks=pytest.mark.deep) for n in ("RMSprop", "Adagrad")),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_density_one_matches_the_formula(name, method):
    two = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    found = by_keras(name, lambda inner: rs.DistributedOptimizer(inner, method), two)
    np.testing.assert_allclose(found, by_numpy(FORMULAS[name]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FORMULAS)
def test_unwrapped_keras_differs(name):
    """If this fails, Keras has changed: correct docs/adaptive.md and docs/when-to-use.md."""
    one = tf.distribute.get_strategy()
    found, expected = by_keras(name, lambda inner: inner, one), by_numpy(FORMULAS[name])
    assert np.abs(found - expected)[:2].max() > 0.02  # rows that were looked up twice
    np.testing.assert_allclose(found[2:], expected[2:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "warns"),
    [("SGD", {"momentum": 0.9}, True), ("Ftrl", {}, True), ("SGD", {}, False), ("Adam", {}, False)],
)
def test_legacy_optimizer_that_would_update_some_rows_warns(name, options, warns):
    inner = getattr(tf_keras.optimizers.legacy, name)(RATE, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = rs.DistributedOptimizer(inner, rs.Dense())
        rows = tf.IndexedSlices(tf.ones([1, WIDTH]), [0])
        optimizer.apply_gradients([(rows, tf.Variable(tf.ones([ROWS, WIDTH])))])
    assert any(f"{name} updates only the rows" in str(w.message) for w in caught) == warns
