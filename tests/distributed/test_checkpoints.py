"""`Checkpoint` on real workers that are killed: training goes on to the bit."""

import os
import signal

import numpy as np
import pytest

from tests.distributed import cluster
from tests.distributed.cluster import LEGACY, run_workers

EPOCHS, STEPS, BATCH = 3, 6, 8
DIES_AT = 9  # steps, in the second epoch


def _family(name):
    if name == "keras3":
        import keras

        return keras
    import tf_keras

    return tf_keras


def _optimizer(keras, family):
    optimizers = keras.optimizers.legacy if family == "legacy" else keras.optimizers
    return optimizers.Adam(0.01)


def _model(family, method, strategy):
    import tf_redsync as rs

    keras = _family(family)
    keras.utils.set_random_seed(7)
    with strategy.scope():
        layers = [keras.layers.Input([12]), keras.layers.Dense(16, activation="relu")]
        if family == "keras3":  # of tf_keras, a dropout cannot be restored
            layers.append(keras.layers.Dropout(0.3, seed=5))
        layers += [keras.layers.BatchNormalization(), keras.layers.Dense(4)]
        model = keras.Sequential(layers)
        optimizer = rs.DistributedOptimizer(_optimizer(keras, family), method)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss=loss, metrics=["accuracy"])
    return keras, model


def _data():
    import tensorflow as tf

    rng = np.random.default_rng(3)
    x = rng.normal(size=[STEPS * BATCH, 12]).astype(np.float32)
    y = rng.integers(0, 4, [STEPS * BATCH])
    data = tf.data.Dataset.from_tensor_slices((x, y))
    return data.shuffle(20, seed=11).batch(BATCH, drop_remainder=True)


def _dies(keras, at):
    class Dies(keras.callbacks.Callback):
        steps = 0

        def on_train_batch_end(self, batch, logs=None):
            self.steps += 1
            if self.steps == at:
                os.kill(os.getpid(), signal.SIGKILL)

    return Dies()


def _losses(keras):
    class Losses(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.batches, self.epochs = [], []

        def on_train_batch_end(self, batch, logs=None):
            self.batches.append(batch)

        def on_epoch_end(self, epoch, logs=None):
            self.epochs.append([epoch, logs["loss"], logs["accuracy"]])

    return Losses()


def _fit(family, method, strategy, directory, dies_at=None):
    import tf_redsync as rs

    keras, model = _model(family, method, strategy)
    losses = _losses(keras)
    callbacks = [losses, rs.callbacks.Checkpoint(directory, every=4)]
    if dies_at is not None:
        callbacks.append(_dies(keras, dies_at))
    model.fit(_data(), epochs=EPOCHS, verbose=0, callbacks=callbacks)
    weights = {f"weight_{i}": np.asarray(w) for i, w in enumerate(model.get_weights())}
    return weights | {"epochs": np.array(losses.epochs), "batches": np.array(losses.batches)}


def _method():
    import tf_redsync as rs

    return rs.RedSync(density=0.05, dense_below=1)


def trained_and_then_killed(family, directory):
    import tf_redsync as rs

    strategy = rs.MultiWorkerMirroredStrategy()
    cluster.save(**_fit(family, _method(), strategy, f"{directory}/whole"))
    _fit(family, _method(), strategy, f"{directory}/killed", DIES_AT)


def went_on(family, directory):
    import tf_redsync as rs

    return _fit(family, _method(), rs.MultiWorkerMirroredStrategy(), f"{directory}/killed")


@pytest.mark.parametrize("family", ["keras3"])
def test_a_killed_run_goes_on_to_the_bit(family, tmp_path):
    env = LEGACY if family != "keras3" else None
    whole = cluster.kill_workers(trained_and_then_killed, args=(family, str(tmp_path)), env=env)
    rest = run_workers(went_on, args=(family, str(tmp_path)), env=env)
    for before, after in zip(whole, rest, strict=True):
        for name in before:
            if name.startswith("weight"):
                np.testing.assert_array_equal(before[name], after[name], name)
        np.testing.assert_array_equal(before["epochs"][1:], after["epochs"])
        assert after["batches"].tolist()[:5] == [2, 3, 4, 5, 0]  # after 8 steps
