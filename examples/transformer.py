"""Trains a small causal transformer on characters with CodedAdam, or another method and AdamW.

    python -m tf_redsync launch -n 2 examples/transformer.py
    ... --data_dir=tinyshakespeare.txt --run_dir=runs/shakespeare
    ... --exchange=ACPSGD --run_dir=runs/acpsgd
    ... --exchange="DiLoCo(steps=20)" --run_dir=runs/diloco

Without --data_dir it reads the topics of Python's own help. Started again, it goes on from its last
checkpoint.
"""

import os

import datasets
import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from keras import layers

import tf_redsync as rs
import tf_redsync.flags

FLAGS = flags.FLAGS
tf_redsync.flags.define(exchange="CodedAdam()", run_dir="runs/transformer")
flags.DEFINE_string("data_dir", None, "A text file, or a folder with one.")
flags.DEFINE_integer("epochs", 5, "In all; each has --steps steps.")
flags.DEFINE_integer("steps", 60, "Steps in an epoch.")
flags.DEFINE_integer("batch_size", 16, "Windows per worker and step.")
flags.DEFINE_integer("window", 64, "Characters in a window.")
flags.DEFINE_integer("width", 128, "Of the residual stream.")
flags.DEFINE_integer("blocks", 2, "Number of blocks.")
flags.DEFINE_float("learning_rate", 2e-3, "Of AdamW, or CodedAdam, after its warm-up.")
flags.DEFINE_float("beta_1", 0.9, "Of AdamW; 0 with sparsifiers.")
flags.DEFINE_integer("seed", 1, "Of the weights and the windows.")


@keras.saving.register_keras_serializable()
class Positions(layers.Layer):
    """Adds a learned vector to each position."""

    def build(self, shape):
        """The vectors."""
        self.vectors = self.add_weight(shape=shape[1:], initializer="uniform", name="vectors")

    def call(self, x):
        """[batch, window, width] as it comes."""
        return x + self.vectors


def build_model(characters: int) -> keras.Model:
    """Blocks of attention and a dense layer, each after a normalization and around a shortcut."""
    inputs = keras.Input((FLAGS.window,), dtype="int32")
    x = Positions()(layers.Embedding(characters, FLAGS.width)(inputs))
    for _ in range(FLAGS.blocks):
        y = layers.LayerNormalization()(x)
        x += layers.MultiHeadAttention(4, FLAGS.width // 4)(y, y, use_causal_mask=True)
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * FLAGS.width, activation="gelu")(y)
        x += layers.Dense(FLAGS.width)(y)
    logits = layers.Dense(characters, name="logits")(layers.LayerNormalization()(x))
    return keras.Model(inputs, logits)


def windows(text: np.ndarray, seed: int) -> tf.data.Dataset:
    """Endless random windows (characters, next characters), int32 [window] each."""

    def window(start):
        part = tf.constant(text)[start : start + FLAGS.window + 1]
        return part[:-1], part[1:]

    starts = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True)
    return starts.map(lambda s: window(s % (len(text) - FLAGS.window)))


def adamw(rate) -> keras.optimizers.Optimizer:
    """AdamW, without weight decay of biases and normalizations.

    CodedAdam exchanges Adam's updates, so the optimizer that applies them is SGD.
    """
    method = tf_redsync.flags.exchange()["method"]
    adapted = any(m.traits.needs_sgd for m in getattr(method, "methods", (method,)))
    if adapted:
        inner = keras.optimizers.SGD(rate, weight_decay=0.1)
    else:
        inner = keras.optimizers.AdamW(rate, weight_decay=0.1, beta_1=FLAGS.beta_1)
    inner.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    return inner


def train(argv, inner) -> None:
    """Trains on the workers of TF_CONFIG, alone without one; `inner(rate)` makes an optimizer."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
    strategy = rs.MultiWorkerMirroredStrategy()
    first = rs.rank() == 0
    keras.utils.set_random_seed(FLAGS.seed)
    texts = datasets.text(FLAGS.data_dir)
    alphabet = sorted(set("".join(texts)))
    number = {c: i for i, c in enumerate(alphabet)}
    text, test = (np.array([number[c] for c in t], "int32") for t in texts)
    if min(len(text), len(test)) <= FLAGS.window:
        raise app.UsageError(
            f"--window={FLAGS.window} must be less than the characters to train with, {len(text)}, "
            f"and to test with, {len(test)}."
        )

    with strategy.scope():
        model = build_model(len(alphabet))
        rate = keras.optimizers.schedules.CosineDecay(
            0.0,
            max(1, FLAGS.epochs * FLAGS.steps),
            alpha=0.1,
            warmup_target=FLAGS.learning_rate,
            warmup_steps=FLAGS.steps // 2,
        )
        optimizer = rs.DistributedOptimizer(inner(rate), **tf_redsync.flags.exchange())
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss)

    def each_worker(context):
        """Its own windows: each worker draws them for itself."""
        data = windows(text, FLAGS.seed + context.input_pipeline_id)
        return data.batch(FLAGS.batch_size, drop_remainder=True).prefetch(2)

    model.fit(
        strategy.distribute_datasets_from_function(each_worker),
        epochs=FLAGS.epochs,
        steps_per_epoch=FLAGS.steps,
        callbacks=[
            rs.callbacks.Checkpoint(os.path.join(FLAGS.run_dir, "checkpoints")),
            rs.callbacks.CompressionMetrics(FLAGS.run_dir),
        ],
        shuffle=False,
        verbose=2 if first else 0,
    )
    count = min(256, (len(test) - 1) // FLAGS.window)
    ends = count * FLAGS.window
    x, y = (part.reshape(count, FLAGS.window) for part in (test[:ends], test[1 : ends + 1]))
    loss = model.evaluate(x, y, batch_size=64, verbose=0)
    if first:
        print(f"test loss {loss:.3f}, perplexity {np.exp(loss):.2f} a character", flush=True)
        model.save(os.path.join(FLAGS.run_dir, "transformer.keras"))


if __name__ == "__main__":
    app.run(lambda argv: train(argv, adamw))
