"""Trains a variational autoencoder on handwritten digits, with a loss in a layer.

    python -m tf_redsync launch -n 2 examples/vae.py

Its data are the 8x8 digits of scikit-learn or, with --data_dir, a folder with Keras's mnist.npz.
Started again, it goes on from its last checkpoint.
"""

import os

import datasets
import keras
import tensorflow as tf
from absl import app, flags
from keras import layers, ops

import tf_redsync as rs
import tf_redsync.flags

FLAGS = flags.FLAGS
tf_redsync.flags.define(exchange="CodedTopK(density=0.03, value_bits=4)", run_dir="runs/vae")
flags.DEFINE_string("data_dir", None, "Folder with mnist.npz. Default: scikit-learn's digits.")
flags.DEFINE_integer("epochs", 60, "Passes over the training set, in all.")
flags.DEFINE_integer("batch_size", 32, "Examples per worker and step.")
flags.DEFINE_integer("width", 256, "Of the hidden layers.")
flags.DEFINE_float("learning_rate", 0.001, "Of Adam.")
flags.DEFINE_integer("seed", 1, "Of the weights, the noise and the order of the examples.")
LATENT = 4


@keras.saving.register_keras_serializable()
class Sample(layers.Layer):
    """Draws the code, and adds its divergence from the prior to the loss."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.noise = keras.random.SeedGenerator()

    def call(self, inputs):
        """From mean and logarithm of the variance, [batch, LATENT] each."""
        mean, log_variance = inputs
        divergence = 0.5 * ops.sum(ops.exp(log_variance) + mean**2 - 1.0 - log_variance, axis=-1)
        self.add_loss(ops.mean(divergence))
        noise = keras.random.normal(ops.shape(mean), seed=self.noise)
        return mean + ops.exp(0.5 * log_variance) * noise


def build_model(pixels: int) -> keras.Model:
    """From images to the logits of their pixels."""
    inputs = keras.Input([pixels])
    x = layers.Dense(FLAGS.width, "relu")(inputs)
    code = Sample()([layers.Dense(LATENT)(x), layers.Dense(LATENT)(x)])
    x = layers.Dense(FLAGS.width, "relu")(code)
    return keras.Model(inputs, layers.Dense(pixels)(x))


@keras.saving.register_keras_serializable()
def reconstruction(images, logits):
    """Negative log-likelihood of an image, the sum over its pixels."""
    return ops.sum(ops.binary_crossentropy(images, logits, from_logits=True), axis=-1)


def main(argv):
    """Trains on the workers of TF_CONFIG; alone without one."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
    strategy = rs.MultiWorkerMirroredStrategy()
    first = rs.rank() == 0
    keras.utils.set_random_seed(FLAGS.seed)
    (images, _), (test, _) = datasets.digits(FLAGS.data_dir)
    images, test = (part.reshape(len(part), -1) for part in (images, test))
    batch = FLAGS.batch_size * strategy.num_replicas_in_sync  # of all workers
    data = tf.data.Dataset.from_tensor_slices((images, images))

    with strategy.scope():
        model = build_model(images.shape[1])
        # Without beta_1: gradients that wait in the residual take the place of Adam's momentum.
        inner = keras.optimizers.Adam(FLAGS.learning_rate, beta_1=0.0)
        model.compile(
            rs.DistributedOptimizer(inner, **tf_redsync.flags.exchange()), loss=reconstruction
        )

    model.fit(
        data.shuffle(len(images), seed=FLAGS.seed).batch(batch, drop_remainder=True),
        epochs=FLAGS.epochs,
        validation_data=tf.data.Dataset.from_tensor_slices((test, test)).batch(batch),
        callbacks=[
            rs.callbacks.Checkpoint(os.path.join(FLAGS.run_dir, "checkpoints")),
            rs.callbacks.CompressionMetrics(FLAGS.run_dir),
        ],
        shuffle=False,  # the dataset does
        verbose=2 if first else 0,
    )
    if first:
        model.save(os.path.join(FLAGS.run_dir, "vae.keras"))


if __name__ == "__main__":
    app.run(main)
