"""Trains a CNN on handwritten digits with TensorFlow Addons' LAMB, for scripts that stay with it.

    pip install ".[addons,keras2]" "tf_keras==2.21.*"   # of your TensorFlow's version
    python -m tf_redsync launch -n 2 examples/addons_lamb.py

`rs.addons.load()` imports Addons 0.23 on a current TensorFlow, with Keras 2 as `tf.keras`. Started
again, the script goes on from its last checkpoint. docs/addons.md has what Keras 3 has instead.
"""

from __future__ import annotations

import os
import warnings

import datasets
import tensorflow as tf
from absl import app, flags

import tf_redsync as rs
import tf_redsync.flags

FLAGS = flags.FLAGS
tf_redsync.flags.define(
    exchange="CodedTopK(density=0.03, value_bits=4)", run_dir="runs/addons_lamb"
)
flags.DEFINE_string("data_dir", None, "Folder with mnist.npz. Default: scikit-learn's digits.")
flags.DEFINE_integer("epochs", 10, "Passes over the training set, in all.")
flags.DEFINE_integer("batch_size", 32, "Examples per worker and step.")
flags.DEFINE_float("learning_rate", 0.01, "Of LAMB.")
flags.DEFINE_integer("seed", 1, "Of the weights and the order of the examples.")


def build_model(shape, classes: int) -> tf.keras.Model:
    """A small CNN; its outputs are logits."""
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.Input(shape),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(256, activation="relu"),
            layers.Dense(classes),
        ]
    )


def main(argv):
    """Trains, evaluates."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
    # That it has ended, and was made for another TensorFlow: docs/addons.md says the same.
    warnings.filterwarnings("ignore", module="tensorflow_addons")
    tfa = rs.addons.load()  # before anything uses `tf.keras`
    strategy = rs.MultiWorkerMirroredStrategy()
    rank = rs.rank()
    batch = FLAGS.batch_size * strategy.num_replicas_in_sync
    (x_train, y_train), (x_test, y_test) = datasets.digits(FLAGS.data_dir)
    train = tf.data.Dataset.from_tensor_slices((x_train, y_train))
    train = train.shuffle(len(x_train), seed=FLAGS.seed).batch(batch, drop_remainder=True)
    test = tf.data.Dataset.from_tensor_slices((x_test, y_test)).batch(batch)

    tf.keras.utils.set_random_seed(FLAGS.seed)
    with strategy.scope():
        model = build_model(x_train.shape[1:], int(y_train.max()) + 1)
        # Without beta_1: gradients that wait in the residual take the place of LAMB's momentum.
        optimizer = tfa.optimizers.LAMB(FLAGS.learning_rate, beta_1=0.0)
        optimizer = rs.DistributedOptimizer(optimizer, **tf_redsync.flags.exchange())
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"])
    model.fit(
        train,
        epochs=FLAGS.epochs,
        validation_data=test,
        callbacks=[
            rs.callbacks.Checkpoint(os.path.join(FLAGS.run_dir, "checkpoints")),
            rs.callbacks.CompressionMetrics(FLAGS.run_dir),
        ],
        verbose=2 if rank == 0 else 0,
    )
    _, accuracy = model.evaluate(test, verbose=0)
    if rank == 0:
        print(f"test accuracy: {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    app.run(main)
