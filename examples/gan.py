"""Trains a small DCGAN on handwritten digits: two models, each with a wrapped optimizer.

    python -m tf_redsync launch -n 2 examples/gan.py

Its data are the 8x8 digits of scikit-learn or, with --data_dir, a folder with Keras's mnist.npz.
What the generator draws goes into --run_dir, as samples-0010.png and so on. Started again, it goes
on from its last checkpoint.
"""

import os

import datasets
import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import tf_redsync as rs
import tf_redsync.flags

FLAGS = flags.FLAGS
tf_redsync.flags.define(exchange="CodedTopK(density=0.03, value_bits=4)", run_dir="runs/gan")
flags.DEFINE_string("data_dir", None, "Folder with mnist.npz. Default: scikit-learn's digits.")
flags.DEFINE_integer("epochs", 150, "Passes over the training set, in all.")
flags.DEFINE_integer("batch_size", 32, "Examples per worker and step.", lower_bound=1)
flags.DEFINE_float("learning_rate", 0.0003, "Of Adam, in both models.")
flags.DEFINE_integer("draw_every", 10, "Epochs between two pictures.", lower_bound=1)
flags.DEFINE_integer("seed", 1, "Of the weights, the noise and the order of the examples.")
LATENT = 32


def build_generator(size: int) -> keras.Model:
    """From noise to images of `size` by `size` pixels in [-1, 1]."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input([LATENT]),
            layers.Dense((size // 4) ** 2 * 128, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Reshape([size // 4, size // 4, 128]),
            layers.Conv2DTranspose(64, 4, strides=2, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Conv2DTranspose(1, 4, strides=2, padding="same", activation="tanh"),
        ],
        name="generator",
    )


def build_discriminator(size: int) -> keras.Model:
    """From images to logits: above zero for what it takes for real."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input([size, size, 1]),
            layers.Conv2D(64, 4, strides=2, padding="same"),
            layers.LeakyReLU(0.2),
            layers.Conv2D(128, 4, strides=2, padding="same"),
            layers.LeakyReLU(0.2),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(1),
        ],
        name="discriminator",
    )


class GAN(keras.Model):
    """Both models, with an optimizer each; `optimizer` is the generator's."""

    def __init__(self, generator, discriminator):
        super().__init__()
        self.generator, self.discriminator = generator, discriminator
        self.d_loss = keras.metrics.Mean(name="d_loss")
        self.g_loss = keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer, g_optimizer):
        """Each optimizer is built for the variables that it will be given."""
        super().compile(optimizer=g_optimizer)
        self.d_optimizer = d_optimizer
        self.d_optimizer.build(self.discriminator.trainable_variables)
        self.optimizer.build(self.generator.trainable_variables)
        self.cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")

    def call(self, images):
        """Keras asks for one, although `train_step` does without."""
        return self.discriminator(images)

    def train_step(self, real):
        """One step of the discriminator and one of the generator."""
        context = tf.distribute.get_replica_context()
        rows = tf.shape(real)[0]
        # Other noise on each worker and in each step, and the same again after a restart.
        step = tf.cast(self.optimizer.iterations, tf.int32)
        seed = tf.stack([FLAGS.seed, context.replica_id_in_sync_group])
        seed = tf.random.experimental.stateless_fold_in(seed, step)
        noise = tf.random.stateless_normal([rows, LATENT], seed)

        with tf.GradientTape(persistent=True) as tape:
            fake = self.generator(noise, training=True)
            of_real = self.discriminator(real, training=True)
            of_fake = self.discriminator(fake, training=True)
            d_losses = self.cross_entropy(0.9 * tf.ones_like(of_real), of_real)
            d_losses += self.cross_entropy(tf.zeros_like(of_fake), of_fake)
            g_losses = self.cross_entropy(tf.ones_like(of_fake), of_fake)
            # By the global batch: the exchange adds up the workers' gradients.
            d_loss = tf.nn.compute_average_loss(d_losses)
            g_loss = tf.nn.compute_average_loss(g_losses)
            # Other values only with a loss scale (float16).
            d_scaled = self.d_optimizer.scale_loss(d_loss)
            g_scaled = self.optimizer.scale_loss(g_loss)
        for model, optimizer, loss in (
            (self.discriminator, self.d_optimizer, d_scaled),
            (self.generator, self.optimizer, g_scaled),
        ):
            variables = model.trainable_variables
            gradients = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
        self.d_loss.update_state(d_losses)
        self.g_loss.update_state(g_losses)
        return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}


class Draw(keras.callbacks.Callback):
    """Lets the generator draw, always from the same noise."""

    def on_epoch_end(self, epoch, logs=None):
        """Writes a picture of 8 by 16 images."""
        if (epoch + 1) % FLAGS.draw_every and epoch + 1 < FLAGS.epochs:
            return
        noise = tf.random.stateless_normal([128, LATENT], [0, 0])
        images = self.model.generator(noise, training=False).numpy()
        images = np.pad(images[..., 0], [(0, 0), (0, 1), (0, 1)])  # a line between two of them
        size = images.shape[1]
        grid = images.reshape(8, 16, size, size).transpose(0, 2, 1, 3).reshape(8 * size, -1, 1)
        grid = grid.repeat(4, 0).repeat(4, 1)  # or one would need a magnifying glass
        path = os.path.join(FLAGS.run_dir, f"samples-{epoch + 1:04d}.png")
        keras.utils.save_img(path, grid)
        print(f"wrote {path}", flush=True)


def main(argv):
    """Trains on the workers of TF_CONFIG; alone without one."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
    strategy = rs.MultiWorkerMirroredStrategy()
    workers = strategy.num_replicas_in_sync
    first = rs.rank() == 0
    keras.utils.set_random_seed(FLAGS.seed)
    (images, _), _ = datasets.digits(FLAGS.data_dir)
    data = tf.data.Dataset.from_tensor_slices(2.0 * images - 1.0)
    data = data.shuffle(len(images), seed=FLAGS.seed)

    def optimizer():
        # Without beta_1: gradients that wait in the residual take the place of Adam's momentum.
        inner = keras.optimizers.Adam(FLAGS.learning_rate, beta_1=0.0)
        return rs.DistributedOptimizer(inner, **tf_redsync.flags.exchange())

    with strategy.scope():
        size = images.shape[1]
        model = GAN(build_generator(size), build_discriminator(size))
        model.compile(optimizer(), optimizer())

    model.fit(
        data.batch(FLAGS.batch_size * workers, drop_remainder=True),
        epochs=FLAGS.epochs,
        callbacks=[
            rs.callbacks.Checkpoint(os.path.join(FLAGS.run_dir, "checkpoints")),
            rs.callbacks.CompressionMetrics(FLAGS.run_dir),  # of `model.optimizer`
            *([Draw()] if first else []),
        ],
        shuffle=False,  # the dataset does
        verbose=2 if first else 0,
    )


if __name__ == "__main__":
    app.run(main)
