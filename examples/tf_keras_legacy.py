"""Trains a CNN on handwritten digits with tf_keras (Keras 2), for scripts that stay with it.

    python -m tf_redsync launch -n 2 examples/tf_keras_legacy.py

Nothing but the imports differs from Keras 3. Scripts that say `tf.keras` get Keras 2 by
TF_USE_LEGACY_KERAS=1 in the environment. Started again, it goes on from its last checkpoint.
"""

import os

import datasets
import tensorflow as tf
import tf_keras as keras
from absl import app, flags

import tf_redsync as rs
import tf_redsync.flags

FLAGS = flags.FLAGS
tf_redsync.flags.define(
    exchange="CodedTopK(density=0.03, value_bits=4)", run_dir="runs/tf_keras_legacy"
)
flags.DEFINE_string("data_dir", None, "Folder with mnist.npz. Default: scikit-learn's digits.")
flags.DEFINE_integer("epochs", 10, "Passes over the training set, in all.")
flags.DEFINE_integer("batch_size", 32, "Examples per worker and step.")
flags.DEFINE_float("learning_rate", 0.002, "Of Adam.")
flags.DEFINE_integer("seed", 1, "Of the weights and the order of the examples.")


def build_model(shape, classes: int) -> keras.Model:
    """A small CNN with BatchNormalization; its outputs are logits."""
    return keras.Sequential(
        [
            keras.layers.Input(shape),
            keras.layers.Conv2D(32, 3, padding="same", use_bias=False),
            keras.layers.BatchNormalization(),  # its statistics are averaged over the workers
            keras.layers.ReLU(),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dense(classes),
        ]
    )


def main(argv):
    """Trains, evaluates, saves."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
    strategy = rs.MultiWorkerMirroredStrategy()
    rank = rs.rank()
    batch = FLAGS.batch_size * strategy.num_replicas_in_sync
    (x_train, y_train), (x_test, y_test) = datasets.digits(FLAGS.data_dir)
    train = tf.data.Dataset.from_tensor_slices((x_train, y_train))
    train = train.shuffle(len(x_train), seed=FLAGS.seed).batch(batch, drop_remainder=True)
    test = tf.data.Dataset.from_tensor_slices((x_test, y_test)).batch(batch)

    keras.utils.set_random_seed(FLAGS.seed)
    with strategy.scope():
        model = build_model(x_train.shape[1:], int(y_train.max()) + 1)
        # Without beta_1: gradients that wait in the residual take the place of Adam's momentum.
        optimizer = keras.optimizers.Adam(FLAGS.learning_rate, beta_1=0.0)
        optimizer = rs.DistributedOptimizer(optimizer, **tf_redsync.flags.exchange())
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
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
