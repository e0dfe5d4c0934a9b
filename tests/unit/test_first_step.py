"""Custom loops without `optimizer.build` equal those that call it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_redsync as rs
from tests import total_state
from tests.optimizers import needs
from tests.unit.test_mirrored import per_replica, weights
from tf_redsync.network import collectives
from tf_redsync.step import workers

BATCH, WIDTH, STEPS = 4, 6, 3
INNER = {
    "keras": keras.optimizers.Adam,
    "tf_keras": tf_keras.optimizers.Adam,
    "legacy": tf_keras.optimizers.legacy.Adam,
}


def train(strategy, family, traced, builds):
    """Trains, and returns the model, the optimizer and its number of variables."""
    library = keras if family == "keras" else tf_keras
    library.utils.set_random_seed(1)
    with strategy.scope():
        layers = [library.layers.Input((WIDTH,)), library.layers.Dense(3)]
        model = library.Sequential(layers)
        optimizer = rs.DistributedOptimizer(INNER[family](0.1), rs.TopK(density=0.2, dense_below=0))
        if builds:
            optimizer.build(model.trainable_variables)

    def replica(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        found = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(found, model.trainable_variables, strict=True))

    def step(x):
        strategy.run(replica, args=(x,))

    step = tf.function(step) if traced else step
    rows = np.random.RandomState(0).randn(STEPS, strategy.num_replicas_in_sync, BATCH, WIDTH)
    for row in rows.astype("float32"):
        step(per_replica(strategy, row))
    variables = optimizer.variables
    return model, optimizer, len(variables() if callable(variables) else variables)


def modes():
    """Returns traced steps in each library, and eager ones in one (in all with `--deep`)."""
    rest = [pytest.param(f, False, marks=pytest.mark.deep) for f in INNER if f != "keras"]
    return [*((family, True) for family in INNER), ("keras", False), *rest]


@pytest.mark.parametrize(("family", "traced"), modes())
def test_first_step_builds(mirrored, family, traced):
    strategy = mirrored(2)
    expected, _, count = train(strategy, family, traced, builds=True)
    model, optimizer, found = train(strategy, family, traced, builds=False)
    assert found == count  # created once, not per replica or trace
    assert optimizer.exchange.step.numpy() == STEPS
    for a, b in zip(weights(strategy, model), weights(strategy, expected), strict=True):
        np.testing.assert_array_equal(a, b)
    residual = next(v for n, v in total_state.total(optimizer.exchange).items() if "residual" in n)
    assert np.abs(residual).max() > 0


def test_build_errors_reach_the_loop(mirrored):
    """A separate thread builds; it must forward its errors."""
    strategy = mirrored(2)
    with strategy.scope():
        weight = tf.Variable(tf.ones([4], tf.float64))
        optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.1), rs.TopK())

    @tf.function
    def step():
        strategy.run(lambda: optimizer.apply([tf.ones([4], tf.float64)], [weight]))

    with pytest.raises(TypeError, match="float64"):
        step()
    assert not optimizer.built


@pytest.mark.parametrize("family", INNER)
def test_without_a_strategy(family):
    weight = tf.Variable([1.0, 2.0])
    optimizer = rs.DistributedOptimizer(INNER[family](0.1), rs.Dense())
    step = tf.function(lambda: optimizer.apply_gradients([(tf.ones([2]), weight)]))
    with pytest.warns(UserWarning, match="one worker"):
        step()
    np.testing.assert_allclose(weight.numpy(), [0.9, 1.9], rtol=1e-4)


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE=4.*launch -n 4"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_TASKS=2.*launch --slurm"),
        ({"WORLD_SIZE": "1"}, None),
        ({"PMI_SIZE": "several"}, None),
        ({"SLURM_NTASKS": "2"}, None),  # one process in a batch script
        ({"SLURM_STEP_NUM_TASKS": "2", "TF_CONFIG": "{}"}, None),  # the Slurm recipe
    ],
)
def test_one_worker_of_another_launcher(variables, named, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.warns(UserWarning, match=named or "there is one worker") as found:
        workers.warn_alone(tf.distribute.get_strategy(), workers.Worker(collectives.Alone()))
    assert ("own model" in str(found[0].message)) == bool(named)


@needs("OptimizerMap")
@pytest.mark.filterwarnings("ignore:tf_redsync. there is one worker")
def test_multi_optimizer_builds_its_optimizers():
    """Keras builds a `MultiOptimizer` within the traced step if there is no strategy."""

    def wrapped():
        return rs.DistributedOptimizer(keras.optimizers.SGD(0.1), rs.TopK())

    choice = keras.optimizers.OptimizerMap(wrapped(), {".*bias": wrapped()})
    model = keras.Sequential([keras.layers.Input((WIDTH,)), keras.layers.Dense(3)])
    model.compile(keras.optimizers.MultiOptimizer(choice), "mse")
    model.fit(np.ones((BATCH, WIDTH)), np.zeros((BATCH, 3)), epochs=STEPS, verbose=0)
    assert [o.exchange.step.numpy() for o in model.optimizer.optimizers] == [STEPS, STEPS]
