"""Workers that drift apart find out, and say how, instead of training different models."""

import numpy as np
import pytest

from tests.deep import DEEP
from tests.distributed.cluster import run_workers


def train_differently():
    """Whatever differs on worker 1 alone, one after the other; returns what both were told."""
    import logging

    import keras
    import tensorflow as tf
    import tf_keras

    import tf_redsync as rs
    from tests.distributed import problems
    from tf_redsync.cluster.agreement import Disagreement

    rank, result = problems.rank(), {}
    strategy = rs.MultiWorkerMirroredStrategy()
    redsync = rs.RedSync(density=0.2, dense_below=16)
    sgd = keras.optimizers.SGD

    def told(name, function):
        """What `function` raises, as a text."""
        try:
            function()
            result[name] = "nothing"
        except (Disagreement, tf.errors.OpError) as error:
            result[name] = f"{type(error).__name__}: {error}"

    def fit(inner, steps_per_execution=1, **options):
        with strategy.scope():
            model = problems.network(keras)
            optimizer = rs.DistributedOptimizer(inner(), rs.Dense())
            model.compile(optimizer, "mse", steps_per_execution=steps_per_execution)
        model.fit(problems.dataset(32, 8), epochs=3, verbose=0, **options)

    mine = 0.8 if rank else 0.9
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, mine)
    plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=100.0)
    told("momentum", lambda: fit(lambda: sgd(0.1, momentum=mine)))
    if DEEP:
        told("schedule", lambda: fit(lambda: sgd(schedule)))
        scaled = keras.optimizers.LossScaleOptimizer
        told("wrapped", lambda: fit(lambda: scaled(sgd(0.1, weight_decay=mine))))
    told("execution", lambda: fit(lambda: sgd(0.1), 1 + rank))
    told("plateau", lambda: fit(lambda: sgd(0.1), callbacks=[] if rank else [plateau]))
    told("nothing", lambda: fit(lambda: sgd(0.1), 2, callbacks=[plateau]))

    def load_on_one_worker():
        with strategy.scope():
            model = problems.network(keras)
            model.compile(rs.DistributedOptimizer(sgd(0.1), rs.Dense()), "mse")
        model.fit(problems.dataset(32, 8), verbose=0)
        if rank == 1:
            model.set_weights([0.5 * w for w in model.get_weights()])
        model.fit(problems.dataset(32, 8), verbose=0)

    told("loaded", load_on_one_worker)
    version, rs.__version__ = rs.__version__, rs.__version__ + ("+local" if rank else "")
    told("version", lambda: fit(lambda: sgd(0.1)))
    rs.__version__ = version

    class Training:
        def __init__(self, family, inner, method=redsync, normalized=False, **options):
            with strategy.scope():
                self.model = problems.network(family, normalized)
                if normalized:
                    self.model.layers[1].trainable = False
                self.optimizer = rs.DistributedOptimizer(inner(), method, check_every=4, **options)
                self.optimizer.build(self.model.trainable_variables)

            def replica_step(x, y):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((self.model(x, training=True) - y) ** 2) / 2.0
                variables = self.model.trainable_variables
                grads = tape.gradient(loss, variables)
                self.optimizer.apply_gradients(zip(grads, variables, strict=True))

            self.run = tf.function(lambda *a: strategy.run(replica_step, args=a), autograph=False)
            self.steps = 0

        def train(self, until):
            while self.steps < until:
                self.run(*problems.regression(8, seed=10 * self.steps + rank))
                self.steps += 1

        def perturb(self, variable):
            """Change one bit on worker 1."""
            variable = variable if isinstance(variable, tf.Variable) else variable.value
            (own,) = strategy.experimental_local_results(variable)
            if rank == 1:
                value = own.numpy()
                bits = value.reshape(-1).view(np.int32)
                bits[-1] ^= 1
                own.assign(value)

        def until_found(self, name):
            told(name, lambda: self.train(20))
            result[f"{name}/step"] = self.steps

    warned = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger("tf_redsync").addHandler(handler)
    restored = Training(keras, lambda: keras.optimizers.Adam(0.02), on_drift="restore")
    restored.train(2)
    restored.perturb(restored.model.layers[0].kernel)
    restored.perturb(restored.optimizer.inner_optimizer.variables[3])
    restored.train(4)
    result["restore/before"] = problems.digest(restored.model)
    restored.train(9)
    result["restore/after"] = problems.digest(restored.model)
    result["restore/told"] = "\n".join(warned)
    slots = [v.numpy().ravel() for v in restored.optimizer.inner_optimizer.variables]
    result["restore/slots"] = np.concatenate(slots)

    training = Training(keras, lambda: sgd(0.1))
    training.train(2)
    if rank == 1:
        training.optimizer.learning_rate = 0.05
    training.until_found("rate")
    training = Training(tf_keras, lambda: tf_keras.optimizers.Adam(0.02))
    training.train(2)
    training.perturb(training.model.layers[0].kernel)
    training.until_found("weight")
    if not DEEP:
        return result
    training = Training(keras, lambda: sgd(0.1), normalized=True)
    training.train(2)
    training.perturb(training.model.layers[1].moving_variance)
    training.until_found("statistic")
    training = Training(keras, lambda: sgd(0.1), rs.LocalSGD(steps=3))
    training.train(2)
    training.perturb(training.optimizer.exchange.consensus.agreed[0])
    training.until_found("local")
    return result


@pytest.fixture(scope="module")
def trained():
    return run_workers(train_differently, timeout=400)


@pytest.mark.parametrize(
    ("what", "both"),
    [
        ("momentum", ("momentum=0.9", "momentum=0.8")),
        pytest.param("schedule", ("decay_rate=0.9", "decay_rate=0.8"), marks=pytest.mark.deep),
        pytest.param("wrapped", ("weight_decay=0.9", "weight_decay=0.8"), marks=pytest.mark.deep),
        ("execution", ("steps_per_execution=1", "steps_per_execution=2")),
        ("plateau", ('begins="0.01"', 'begins="0.1"')),
        ("version", ("versions.tf_redsync", "+local")),
    ],
)
def test_what_differs_at_the_start_or_between_epochs(trained, what, both):
    for worker in trained:
        assert "Disagreement" in worker[what] and "the workers disagree" in worker[what]
        for text in both:
            assert text in worker[what], worker[what]
        assert "trainable_variables" not in worker[what]  # what is equal is not shown


def test_nothing_is_found_where_nothing_differs(trained):
    for worker in trained:
        assert worker["nothing"] == "nothing"


@pytest.mark.parametrize(
    ("what", "texts"),
    [
        ("rate", ("worker 1 has the learning rate 0.05", "worker 0 has 0.1")),
        ("weight", ("worker 1 has the bits of 'dense", "kernel")),
        pytest.param(
            "statistic", ("worker 1 has the bits of", "moving_variance"), marks=pytest.mark.deep
        ),
        pytest.param("local", ("worker 1 has the bits of", "kernel"), marks=pytest.mark.deep),
    ],
)
def test_what_drifts_apart_stops_all_workers(trained, what, texts):
    for worker in trained:
        assert "the workers have drifted apart" in worker[what]
        for text in texts:
            assert text in worker[what], worker[what]
        assert worker[f"{what}/step"] == 4  # the fifth one compared, and raised


def test_weights_that_one_worker_has_loaded_between_two_fits(trained):
    for worker in trained:
        assert "the workers have drifted apart" in worker["loaded"], worker["loaded"]
        assert "worker 1 has the bits of" in worker["loaded"] and "kernel" in worker["loaded"]


def test_worker_0_is_taken_over(trained):
    first, second = trained
    assert first["restore/before"] != second["restore/before"]
    assert first["restore/after"] == second["restore/after"]
    np.testing.assert_array_equal(first["restore/slots"], second["restore/slots"])
    for worker in trained:
        assert "worker 1 has the bits of" in worker["restore/told"]
        assert "the weights of worker 0" in worker["restore/told"]
        assert worker["restore/told"].count("drifted") == 1
