"""Local steps, delay and points of one's own on two real workers, against numpy."""

import numpy as np
import pytest

from tests.distributed.cluster import run_workers

STEPS, BATCH, RATE, MOMENTUM = 7, 8, 0.05, 0.9
FAMILIES = ("keras3", "tf_keras", "legacy")


def data_of(rank, same_inputs=False):
    """`STEPS` batches of a worker's own: not the same problem for both.

    With the same inputs for all workers in all steps, all losses have the same second derivatives.
    """
    generator = np.random.default_rng(0 if same_inputs else rank)
    x = generator.standard_normal((STEPS, BATCH, 12)).astype(np.float32)
    if same_inputs:
        x = np.repeat(x[:1], STEPS, axis=0)
    y = x @ np.arange(12, dtype=np.float32)[:, None] / 12 + rank
    return x, y.astype(np.float32)


def train_apart(family, method_config, momentum=MOMENTUM, same_inputs=False):
    """Train a linear model; return this worker's weights after every step and at the end."""
    import os

    if family != "keras3":
        os.environ["TF_USE_LEGACY_KERAS"] = "1"
    import tensorflow as tf

    import tf_redsync as rs
    from tests.distributed import problems

    strategy = rs.MultiWorkerMirroredStrategy()
    if family == "keras3":
        import keras
    else:
        import tf_keras as keras
    optimizers = keras.optimizers.legacy if family == "legacy" else keras.optimizers
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input((12,)), keras.layers.Dense(1, kernel_initializer="zeros")]
        )
        inner = optimizers.SGD(RATE, momentum=momentum)
        optimizer = rs.DistributedOptimizer(inner, rs.methods.from_config(method_config))
        optimizer.build(model.trainable_variables)

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2) / strategy.num_replicas_in_sync
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    run = tf.function(lambda x, y: strategy.run(replica_step, (x, y)))
    local = strategy.experimental_local_results

    def own():
        values = [getattr(v, "value", v) for v in model.trainable_variables]
        values = [v() if callable(v) and not isinstance(v, tf.Variable) else v for v in values]
        return np.concatenate([np.ravel(local(v)[0].numpy()) for v in values])

    steps, agreed, sent = [], [], []
    for x, y in zip(*data_of(problems.rank(), same_inputs), strict=True):
        run(tf.constant(x), tf.constant(y))
        steps.append(own())
        consensus = [local(v)[0].numpy() for v in optimizer.exchange.consensus.agreed]
        agreed.append(np.concatenate([np.ravel(v) for v in consensus]))
        sent.append(float(optimizer.exchange.bytes_sent.numpy()))
    optimizer.exchange.to_consensus()
    return {"steps": np.stack(steps), "agreed": np.stack(agreed), "sent": sent, "end": own()}


class Simulated:
    """The same model on all workers in float64: weights `[13]`, kernel and bias."""

    def __init__(self, workers=2, same_inputs=False):
        self.data = [data_of(r, same_inputs) for r in range(workers)]
        self.workers = workers

    def gradient(self, rank, step, w):
        x, y = (a[step].astype(np.float64) for a in self.data[rank])
        error = x @ w[:12, None] + w[12] - y
        return np.append(2 * (x.T @ error).ravel(), 2 * error.sum()) / BATCH

    def local_sgd(self, every):
        agreed = np.zeros(13)
        own = [agreed.copy() for _ in range(self.workers)]
        velocity = [np.zeros(13) for _ in own]
        history = []
        for step in range(STEPS):
            for r in range(self.workers):
                velocity[r] = MOMENTUM * velocity[r] - RATE * self.gradient(r, step, own[r])
                own[r] = own[r] + velocity[r]
            if (step + 1) % every == 0:
                agreed = np.mean(own, axis=0)
                own = [agreed.copy() for _ in own]
            history.append([w.copy() for w in own])
        return history, np.mean(own, axis=0)

    def cd_sgd(self, momentum):
        """Sent in full: own weights and consensus after every step."""
        agreed, velocity = np.zeros(13), np.zeros(13)
        own, pending = [agreed.copy() for _ in range(self.workers)], np.zeros(13)
        history, consensus = [], []
        for step in range(STEPS):
            gradients = [self.gradient(r, step, own[r]) for r in range(self.workers)]
            velocity = momentum * velocity - RATE * pending
            agreed = agreed + velocity
            own = [agreed - RATE * g for g in gradients]
            pending = np.mean(gradients, axis=0)
            history.append([w.copy() for w in own])
            consensus.append(agreed.copy())
        return history, consensus

    def synchronous_sgd(self):
        w, history = np.zeros(13), []
        for step in range(STEPS):
            w = w - RATE * np.mean([self.gradient(r, step, w) for r in range(self.workers)], axis=0)
            history.append(w)
        return history


@pytest.mark.parametrize("family", FAMILIES)
def test_local_sgd_averages_the_weights(family):
    import tf_redsync as rs

    results = run_workers(train_apart, args=(family, rs.LocalSGD(steps=3).get_config()))
    expected, end = Simulated().local_sgd(every=3)
    for step in range(STEPS):
        for rank, result in enumerate(results):
            np.testing.assert_allclose(
                result["steps"][step], expected[step][rank], rtol=1e-4, atol=1e-5
            )
    first, second = results
    apart = [not np.array_equal(first["steps"][t], second["steps"][t]) for t in range(STEPS)]
    assert apart == [True, True, False, True, True, False, True]
    assert [s > 0 for s in first["sent"]] == [False, False, True, False, False, True, False]
    np.testing.assert_array_equal(first["end"], second["end"])
    np.testing.assert_allclose(first["end"], end, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_cd_sgd_makes_up_for_the_delay(family):
    import tf_redsync as rs

    method = rs.CDSGD(full_every=1, warm_up=None).get_config()
    results = run_workers(train_apart, args=(family, method))
    own, agreed = Simulated().cd_sgd(MOMENTUM)
    for step in range(STEPS):
        for rank, result in enumerate(results):
            found = result["steps"][step]
            np.testing.assert_allclose(found, own[step][rank], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(result["agreed"][step], agreed[step], rtol=1e-4, atol=1e-5)
            np.testing.assert_array_equal(result["agreed"][step], results[0]["agreed"][step])
    for result in results:
        np.testing.assert_array_equal(result["end"], results[0]["agreed"][-1])


def test_cd_sgd_is_synchronous_sgd_on_a_quadratic():
    """The consensus is one step behind, and takes the same way."""
    import tf_redsync as rs

    method = rs.CDSGD(full_every=1, warm_up=None).get_config()
    first, _ = run_workers(train_apart, args=("keras3", method, 0.0, True))
    expected = Simulated(same_inputs=True).synchronous_sgd()
    np.testing.assert_allclose(first["agreed"][1:], expected[:-1], rtol=1e-4, atol=1e-5)
