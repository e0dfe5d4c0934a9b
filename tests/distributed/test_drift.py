"""Workers whose weights or settings drift apart raise an error."""

import numpy as np
import pytest

from tests.deep import DEEP
from tests.distributed.cluster import run_workers


def train_differently():
    """Changes one thing at a time on worker 1; returns the errors of both workers."""
    import logging

    import keras
    import tensorflow as tf
    import tf_keras

    import tf_redsync as rs
    from tests.distributed import problems
    from tf_redsync.building import libraries
    from tf_redsync.cluster.agreement import Disagreement
    from tf_redsync.step.drift import Drifted

    rank, result = problems.rank(), {}
    strategy = rs.MultiWorkerMirroredStrategy()
    redsync = rs.RedSync(density=0.2, dense_below=16)
    sgd = keras.optimizers.SGD

    def record_error(name, function):
        """Records the error that `function` raises, as text."""
        try:
            function()
            result[name] = "nothing"
        except (Disagreement, Drifted, tf.errors.OpError) as error:
            result[name] = f"{type(error).__name__}: {error}"

    def fit(inner, steps_per_execution=1, **options):
        with strategy.scope():
            model = problems.network(keras)
            optimizer = rs.DistributedOptimizer(inner(), rs.Dense())
            model.compile(optimizer, "mse", steps_per_execution=steps_per_execution)
        model.fit(problems.dataset(32, 8), epochs=3, verbose=0, **options)

    value_of_worker = 0.8 if rank else 0.9
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, value_of_worker)
    plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=100.0)
    record_error("momentum", lambda: fit(lambda: sgd(0.1, momentum=value_of_worker)))
    if DEEP:
        record_error("schedule", lambda: fit(lambda: sgd(schedule)))
        scaled = keras.optimizers.LossScaleOptimizer
        record_error("wrapped", lambda: fit(lambda: scaled(sgd(0.1, weight_decay=value_of_worker))))
    record_error("execution", lambda: fit(lambda: sgd(0.1), 1 + rank))
    record_error("plateau", lambda: fit(lambda: sgd(0.1), callbacks=[] if rank else [plateau]))

    def halve(model):
        if rank == 1:
            model.set_weights([0.5 * w for w in model.get_weights()])

    class Halves(keras.callbacks.Callback):
        """Changes the weights on worker 1 after an epoch, as SwapEMAWeights does after the last."""

        def __init__(self, after):
            super().__init__()
            self.after = after

        def on_epoch_end(self, epoch, logs=None):
            if epoch == self.after:
                halve(self.model)

    callbacks = [plateau, Halves(after=2)]
    record_error("nothing", lambda: fit(lambda: sgd(0.1), 2, callbacks=callbacks))
    record_error("end", lambda: fit(lambda: sgd(0.1), callbacks=[Halves(after=1)]))

    def load_on_one_worker():
        with strategy.scope():
            model = problems.network(keras)
            model.compile(rs.DistributedOptimizer(sgd(0.1), rs.Dense()), "mse")
        model.fit(problems.dataset(32, 8), verbose=0)
        halve(model)
        model.fit(problems.dataset(32, 8), verbose=0)

    record_error("loaded", load_on_one_worker)
    version, rs.__version__ = rs.__version__, rs.__version__ + ("+local" if rank else "")
    record_error("version", lambda: fit(lambda: sgd(0.1)))
    rs.__version__ = version
    digest = libraries.digest_of_package
    libraries.digest_of_package = lambda: "01abcdef" if rank else digest()
    record_error("sources", lambda: fit(lambda: sgd(0.1)))
    libraries.digest_of_package = digest

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

        def train_until_error(self, name):
            record_error(name, lambda: self.train(20))
            result[f"{name}/step"] = self.steps

    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("tf_redsync").addHandler(handler)
    adam, ef21 = keras.optimizers.Adam, rs.contrib.EF21(density=0.2, dense_below=16)
    restored = Training(keras, lambda: adam(0.02), ef21, on_drift="restore")
    restored.train(2)
    restored.perturb(restored.model.layers[0].kernel)
    restored.perturb(restored.optimizer.inner_optimizer.variables[3])
    shared = [v for state in restored.optimizer.exchange.states for v in state.shared()]
    total = next(v for v in shared if "total" in v.name)
    (own_total,) = strategy.experimental_local_results(total)
    own_total.assign(own_total + 0.01 * rank)
    restored.train(4)
    result["restore/before"] = problems.digest(restored.model)
    restored.train(9)
    result["restore/after"] = problems.digest(restored.model)
    result["restore/warned"] = "\n".join(messages)
    variables = [*restored.optimizer.inner_optimizer.variables, *shared]
    slots = [v.numpy().ravel() for v in variables]
    result["restore/slots"] = np.concatenate(slots)

    training = Training(keras, lambda: sgd(0.1))
    training.train(2)
    if rank == 1:
        training.optimizer.learning_rate = 0.05
    training.train_until_error("rate")
    training = Training(tf_keras, lambda: tf_keras.optimizers.Adam(0.02))
    training.train(2)
    training.perturb(training.model.layers[0].kernel)
    training.train_until_error("weight")
    if not DEEP:
        return result
    training = Training(keras, lambda: sgd(0.1), normalized=True)
    training.train(2)
    training.perturb(training.model.layers[1].moving_variance)
    training.train_until_error("statistic")
    training = Training(keras, lambda: sgd(0.1), rs.LocalSGD(steps=3))
    training.train(2)
    training.perturb(training.optimizer.exchange.consensus.agreed[0])
    training.train_until_error("local")
    return result


@pytest.fixture(scope="module")
def trained():
    return run_workers(train_differently, timeout=200)


@pytest.mark.parametrize(
    ("case", "both"),
    [
        ("momentum", ("momentum=0.9", "momentum=0.8")),
        pytest.param("schedule", ("decay_rate=0.9", "decay_rate=0.8"), marks=pytest.mark.deep),
        pytest.param("wrapped", ("weight_decay=0.9", "weight_decay=0.8"), marks=pytest.mark.deep),
        ("execution", ("steps_per_execution=1", "steps_per_execution=2")),
        ("plateau", ('begins="0.01"', 'begins="0.1"')),
        ("version", ("versions.tf_redsync", "+local")),
        ("sources", ('versions.tf_redsync="', " with sources 01abcdef")),
    ],
)
def test_different_settings_raise_at_start_or_between_epochs(trained, case, both):
    for worker in trained:
        assert "Disagreement" in worker[case] and "the workers disagree" in worker[case]
        for text in both:
            assert text in worker[case], worker[case]
        assert "trainable_variables" not in worker[case]  # equal settings are not shown


def test_equal_workers_raise_nothing(trained):
    for worker in trained:
        assert worker["nothing"] == "nothing"


@pytest.mark.parametrize(
    ("case", "texts"),
    [
        ("rate", ("worker 1 has the learning rate 0.05", "worker 0 has 0.1")),
        ("weight", ("worker 1 has the bits of 'dense", "kernel")),
        pytest.param(
            "statistic", ("worker 1 has the bits of", "moving_variance"), marks=pytest.mark.deep
        ),
        pytest.param("local", ("worker 1 has the bits of", "kernel"), marks=pytest.mark.deep),
    ],
)
def test_drift_stops_all_workers(trained, case, texts):
    for worker in trained:
        assert "the workers have drifted apart" in worker[case]
        for text in texts:
            assert text in worker[case], worker[case]
        assert worker[f"{case}/step"] == 4  # detected at the fifth step


@pytest.mark.parametrize("case", ["loaded", "end"])
def test_weights_loaded_on_one_worker_between_comparisons_raise(trained, case):
    for worker in trained:
        assert "the workers have drifted apart" in worker[case], worker[case]
        assert "worker 1 has the bits of" in worker[case] and "kernel" in worker[case]
    assert trained[0]["end"].startswith("Drifted")


def test_restore_copies_weights_of_worker_0(trained):
    first, second = trained
    assert first["restore/before"] != second["restore/before"]
    assert first["restore/after"] == second["restore/after"]
    np.testing.assert_array_equal(first["restore/slots"], second["restore/slots"])
    assert "worker 1 has the bits of" in first["restore/warned"]
    assert "the weights of worker 0" in first["restore/warned"]
    assert first["restore/warned"].count("drifted") == 1
    assert not second["restore/warned"]
