"""Small models and data for tests on worker processes; imported inside the workers."""

import hashlib
import json
import os

import numpy as np
import tensorflow as tf

WIDTH = 12


def rank() -> int:
    """This process's task index."""
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"]


def regression(rows: int, seed: int = 0):
    """Inputs `[rows, 12]` and targets `[rows, 1]`, the same on every worker."""
    generator = np.random.RandomState(seed)
    x = generator.randn(rows, WIDTH).astype("float32")
    weights = generator.randn(WIDTH, 1).astype("float32")
    return x, (x @ weights + 0.1 * generator.randn(rows, 1)).astype("float32")


def dataset(rows: int, batch: int):
    """A dataset of global batches that `tf.distribute` shards by rows among the workers."""
    return sharded(tf.data.Dataset.from_tensor_slices(regression(rows)).batch(batch))


def sharded(data):
    """`data` with options for tests: each worker gets its rows of each batch.

    Autotuning is off. An iterator that is deleted while tf.data tunes waits for the tuning thread,
    which may sleep for as long as the iterator has lived.
    """
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    options.autotune.enabled = False
    return data.with_options(options)


def network(keras, normalized: bool = False):
    """A small regression network of `keras` or `tf_keras`, from a fixed seed."""
    keras.utils.set_random_seed(7)
    hidden = [keras.layers.Dense(48, activation="relu")]
    if normalized:
        hidden.append(keras.layers.BatchNormalization())
    return keras.Sequential([keras.layers.Input((WIDTH,)), *hidden, keras.layers.Dense(1)])


def digest(model) -> str:
    """A hash of all weights, bit by bit."""
    data = b"".join(np.asarray(w).tobytes() for w in model.get_weights())
    return hashlib.sha256(data).hexdigest()


def step_of(strategy, model, optimizer):
    """A training step of a custom loop with mean squared error; maps a batch to its loss."""
    with strategy.scope():
        optimizer.build(model.trainable_variables)

    def replica_step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            loss = loss / strategy.num_replicas_in_sync
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    @tf.function(autograph=False)
    def step(batch):
        return strategy.reduce("SUM", strategy.run(replica_step, args=(batch,)), axis=None)

    return step


def train_loop(strategy, model, optimizer, data, epochs: int) -> tuple[list[float], list[str]]:
    """A custom loop with mean squared error; returns losses and weight hashes of all steps."""
    step, losses, digests = step_of(strategy, model, optimizer), [], []
    for batch in strategy.experimental_distribute_dataset(data.repeat(epochs)):
        losses.append(float(step(batch)))
        digests.append(digest(model))
    return losses, digests
