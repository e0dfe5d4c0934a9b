"""Steps that are non-finite on one worker leave no trace and are reported on all workers."""

import numpy as np
import pytest

from tests import total_state
from tests.deep import DEEP
from tests.distributed.cluster import run_workers

# Each family applies updates differently. Skips of a LossScaleOptimizer: test_disagreement.py; all
# optimizers on replicas of one process: unit/test_skipped_steps.py.
CASES = ("keras3", "scaled", "tf_keras", "addons") if DEEP else ("keras3",)


def train_with_bad_steps():
    """Each case with and without non-finite steps in between; then the messages of all workers."""
    import logging

    import keras
    import tensorflow as tf
    import tf_keras

    import tf_redsync as rs
    from tests.distributed import problems

    rank, result = problems.rank(), {}
    strategy = rs.MultiWorkerMirroredStrategy()
    addons = rs.addons.load().optimizers

    class Training:
        def __init__(self, family, inner, method, **options):
            with strategy.scope():
                self.model = problems.network(family, normalized=True)
                self.inner = inner()
                self.optimizer = rs.DistributedOptimizer(self.inner, method, **options)
                self.optimizer.build(self.model.trainable_variables)
            scale = getattr(self.optimizer, "scale_loss", lambda loss: loss)

            def replica_step(x, y, bad):
                x = tf.where(tf.equal(bad, 1), np.float32("nan"), x)
                y = tf.where(tf.equal(bad, 2), np.float32("nan"), y)  # the statistics are finite
                with tf.GradientTape() as tape:
                    loss = scale(tf.reduce_mean((self.model(x, training=True) - y) ** 2) / 2.0)
                variables = self.model.trainable_variables
                grads = tape.gradient(loss, variables)
                self.optimizer.apply_gradients(zip(grads, variables, strict=True))

            self.run = tf.function(lambda *a: strategy.run(replica_step, args=a), autograph=False)

        def step(self, number, bad=0):
            x, y = problems.regression(8, seed=10 * number + rank)
            self.run(x, y, tf.constant(bad if rank == 1 else 0))

        def values(self):
            listed = self.inner.variables
            listed = [*self.model.variables, *(listed() if callable(listed) else listed)]
            own_values = []
            for v in listed:
                v = v if isinstance(v, tf.Variable) else v.value
                name = getattr(v, "name", "")
                if "step_counter" not in name and "dynamic_scale" not in name:
                    own_values.append(strategy.experimental_local_results(v)[0].numpy().ravel())
            return np.concatenate([np.asarray(m, np.float64) for m in own_values])

        def state(self):
            state = total_state.total(self.optimizer.exchange)
            kept = [state[n].ravel() for n in sorted(state) if n not in ("step", "skipped")]
            return np.concatenate([np.zeros(1), *kept])

    topk = rs.RedSync(density=0.2, dense_below=16)
    cases = {
        "keras3": (
            keras, lambda: keras.optimizers.AdamW(0.02, weight_decay=0.1, use_ema=True), topk
        ),
        "scaled": (
            keras,
            lambda: keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(0.02, weight_decay=0.1), initial_scale=4.0
            ),
            topk,
        ),
        "tf_keras": (
            tf_keras, lambda: tf_keras.optimizers.SGD(0.02, momentum=0.5, weight_decay=0.1), topk
        ),
        "addons": (tf_keras, lambda: addons.AdamW(0.1, 0.02), topk),
    }  # fmt: skip
    for name in CASES:
        with_bad, without = Training(*cases[name]), Training(*cases[name])
        for number in range(3):
            with_bad.step(7, bad=1 + number % 2)
            with_bad.step(number)
            without.step(number)
        result[f"{name}/values"] = with_bad.values()
        result[f"{name}/expected"] = without.values()
        result[f"{name}/state"], result[f"{name}/expected_state"] = (
            with_bad.state(),
            without.state(),
        )
        result[f"{name}/skipped"] = int(with_bad.optimizer.exchange.skipped.numpy())
        result[f"{name}/others"] = int(without.optimizer.exchange.skipped.numpy())

    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("tf_redsync").addHandler(handler)
    local = Training(keras, lambda: keras.optimizers.SGD(0.02), rs.LocalSGD(steps=4))
    for number in range(12):
        local.step(number, bad=1)
    result["local/messages"] = "\n".join(messages)
    result["local/skipped"] = int(local.optimizer.exchange.skipped.numpy())
    result["local/digest"] = problems.digest(local.model)
    result["local/statistics"] = local.model.layers[1].moving_mean.numpy()
    messages.clear()

    with strategy.scope():
        model = problems.network(keras)
        model.compile(
            rs.DistributedOptimizer(keras.optimizers.SGD(0.02), rs.Dense(), max_skipped_steps=12),
            "mse",
            steps_per_execution=2,
        )
    x, y = problems.regression(4)
    bad_y = np.where(rank == 1, np.float32("nan"), y)

    def data(*arrays):
        return strategy.distribute_datasets_from_function(
            lambda _: tf.data.Dataset.from_tensors(arrays).repeat(8)
        )

    result["fit/history"] = model.fit(data(x, y), epochs=2, steps_per_epoch=4, verbose=0).history[
        "skipped_steps"
    ]
    try:
        model.fit(data(x, bad_y), epochs=2, steps_per_epoch=8, verbose=0)
    except tf.errors.OpError as error:
        result["fit/error"] = str(error)
    result["fit/messages"] = "\n".join(messages)
    result["fit/skipped"] = int(model.optimizer.exchange.skipped.numpy())
    return result


@pytest.fixture(scope="module")
def trained():
    return run_workers(train_with_bad_steps, timeout=200)


@pytest.mark.parametrize("case", CASES)
def test_nonfinite_steps_leave_no_trace(trained, case):
    for worker in trained:
        assert np.isfinite(worker[f"{case}/values"]).all()
        np.testing.assert_array_equal(worker[f"{case}/values"], worker[f"{case}/expected"])
        np.testing.assert_array_equal(worker[f"{case}/state"], worker[f"{case}/expected_state"])
        assert (worker[f"{case}/skipped"], worker[f"{case}/others"]) == (3, 0)


def test_skipped_local_steps_are_counted_on_all_workers(trained):
    first, second = trained
    assert first["local/skipped"] == second["local/skipped"] == 12
    assert first["local/digest"] == second["local/digest"]
    assert np.isfinite(first["local/statistics"]).all()
    for worker in trained:
        assert "12 steps in a row were skipped" in worker["local/messages"]
        assert "on worker 1 in the gradient of" in worker["local/messages"]
        assert "worker 0" not in worker["local/messages"]


def test_fit_warns_and_then_stops_on_all_workers(trained):
    for worker in trained:
        assert list(worker["fit/history"]) == [0, 0]
        assert "10 steps in a row were skipped" in worker["fit/messages"]
        assert "on worker 1 in the gradient of" in worker["fit/messages"]
        assert "12 steps in a row were skipped" in worker["fit/error"]
        assert "worker 0" not in worker["fit/error"]
        assert worker["fit/skipped"] == 12
