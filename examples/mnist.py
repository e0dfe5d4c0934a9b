"""Trains a CNN on handwritten digits: the shortest example, and the pattern of the others.

    python -m tf_redsync launch -n 2 examples/mnist.py

Its data are the 8x8 digits of scikit-learn or, with --data_dir, a folder with Keras's mnist.npz.
Started again, it goes on from its last checkpoint; with another --run_dir it begins anew.
"""

import os

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import tf_redsync as rs
import tf_redsync.flags

FLAGS = flags.FLAGS
tf_redsync.flags.define(exchange="CodedGMC(momentum=0.9)", run_dir="runs/mnist")
flags.DEFINE_string("data_dir", None, "Folder with mnist.npz. Default: scikit-learn's digits.")
flags.DEFINE_integer("epochs", 10, "Passes over the training set, in all.")
flags.DEFINE_integer("batch_size", 32, "Examples per worker and step.")
flags.DEFINE_float(
    "learning_rate",
    0.01,
    "Of SGD, per worker: it grows with the batch. A resumed run keeps its saved rate.",
)


def load_data():
    """Returns (images, labels) for training and for testing; images float32 in [0, 1]."""
    if FLAGS.data_dir:
        with np.load(os.path.join(FLAGS.data_dir, "mnist.npz")) as data:
            x, y, x_test, y_test = (data[n] for n in ("x_train", "y_train", "x_test", "y_test"))
        x, x_test = x / 255.0, x_test / 255.0
    else:
        from sklearn.datasets import load_digits

        digits = load_digits()
        order = np.random.default_rng(0).permutation(len(digits.target))
        x, x_test = np.split(digits.images[order] / 16.0, [1500])
        y, y_test = np.split(digits.target[order], [1500])
    return (x[..., None].astype("float32"), y), (x_test[..., None].astype("float32"), y_test)


def main(argv):
    """Trains on the workers of TF_CONFIG; alone without one."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
    strategy = rs.MultiWorkerMirroredStrategy()
    workers = strategy.num_replicas_in_sync
    first = rs.rank() == 0
    keras.utils.set_random_seed(1)
    train, test = load_data()
    batch = FLAGS.batch_size * workers  # of all workers: tf.distribute divides it
    data = tf.data.Dataset.from_tensor_slices(train).shuffle(len(train[0]), seed=1)

    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input(train[0].shape[1:]),
                keras.layers.Conv2D(32, 3, activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dense(256, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        optimizer = rs.DistributedOptimizer(
            keras.optimizers.SGD(FLAGS.learning_rate * workers), **tf_redsync.flags.exchange()
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"])

    model.fit(
        data.batch(batch, drop_remainder=True),
        epochs=FLAGS.epochs,
        validation_data=tf.data.Dataset.from_tensor_slices(test).batch(batch),
        callbacks=[
            rs.callbacks.Checkpoint(os.path.join(FLAGS.run_dir, "checkpoints")),
            rs.callbacks.CompressionMetrics(FLAGS.run_dir),
        ],
        shuffle=False,  # the dataset does
        verbose=2 if first else 0,
    )
    if first:
        model.save(os.path.join(FLAGS.run_dir, "mnist.keras"))


if __name__ == "__main__":
    app.run(main)
