"""Trains a GPT-2 of KerasHub on characters, then fine-tunes it on other text by LoRA.

    python -m tf_redsync launch -n 2 examples/hub_lora.py
    ... --preset=gpt2_base_en --data_dir=text.txt --run_dir=runs/gpt2

Without --preset the weights are random: the model first learns the first half of the text, whole.
With --preset, which KerasHub downloads, there is only LoRA. Without --data_dir it reads the topics
of Python's own help. Started again, it goes on from its last checkpoint. README.md says how to
install KerasHub.
"""

import os

import datasets
import keras
import keras_hub
import numpy as np
import tensorflow as tf
from absl import app, flags

import tf_redsync as rs
import tf_redsync.flags

FLAGS = flags.FLAGS
tf_redsync.flags.define(exchange="CodedTopK(density=0.03, value_bits=4)", run_dir="runs/hub_lora")
flags.DEFINE_string("data_dir", None, "A text file, or a folder with one.")
flags.DEFINE_string("preset", None, "Of a KerasHub CausalLM, such as gpt2_base_en.")
flags.DEFINE_integer("rank", 4, "Of LoRA's matrices.")
flags.DEFINE_integer("epochs", 2, "Of each phase.")
flags.DEFINE_integer("steps", 60, "Steps in an epoch.")
flags.DEFINE_integer("batch_size", 8, "Windows per worker and step.")
flags.DEFINE_integer("window", 64, "Tokens in a window.")
flags.DEFINE_integer("width", 128, "Of the residual stream, without --preset.")
flags.DEFINE_float("learning_rate", 0.002, "Of Adam.")
flags.DEFINE_integer("seed", 1, "Of the weights and the windows.")


def build_model(alphabet: list[str]) -> keras.Model:
    """A preset, or a small GPT-2 on the characters of the text."""
    models = keras_hub.models
    if FLAGS.preset:
        return models.CausalLM.from_preset(FLAGS.preset)
    backbone = models.GPT2Backbone(
        vocabulary_size=len(alphabet),
        num_layers=2,
        num_heads=4,
        hidden_dim=FLAGS.width,
        intermediate_dim=4 * FLAGS.width,
        max_sequence_length=FLAGS.window,
        dropout=0.0,
    )
    return models.GPT2CausalLM(backbone)


def windows(tokens: np.ndarray, seed: int) -> tf.data.Dataset:
    """Endless random windows, as the inputs of a CausalLM and the tokens that follow."""

    def window(start):
        part = tf.constant(tokens)[start : start + FLAGS.window + 1]
        inputs = {"token_ids": part[:-1], "padding_mask": tf.ones(FLAGS.window, "int32")}
        return inputs, part[1:]

    starts = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True)
    return starts.map(lambda s: window(s % (len(tokens) - FLAGS.window)))


def train_phase(strategy, model, name: str, tokens: np.ndarray) -> None:
    """Compiles and trains: whenever other variables are trained, that takes a new optimizer."""
    if len(tokens) <= FLAGS.window:
        raise app.UsageError(
            f"--window={FLAGS.window} must be less than the tokens of a phase, {len(tokens)}."
        )
    first = rs.rank() == 0
    with strategy.scope():
        # Without beta_1: gradients that wait in the residual take the place of Adam's momentum.
        inner = keras.optimizers.Adam(FLAGS.learning_rate, beta_1=0.0)
        optimizer = rs.DistributedOptimizer(inner, **tf_redsync.flags.exchange())
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=optimizer, loss=loss)
    trained = sum(tf.size(v).numpy() for v in model.trainable_variables)
    if first:
        print(f"== {name}: {trained:,} of {model.count_params():,} weights learn", flush=True)

    # The same windows on all workers, of which tf.distribute gives each a part: a model of KerasHub
    # takes no distributed dataset.
    batch = FLAGS.batch_size * strategy.num_replicas_in_sync
    run_dir = os.path.join(FLAGS.run_dir, name)
    model.fit(
        windows(tokens, FLAGS.seed).batch(batch, drop_remainder=True).prefetch(2),
        epochs=FLAGS.epochs,
        steps_per_epoch=FLAGS.steps,
        callbacks=[
            rs.callbacks.Checkpoint(os.path.join(run_dir, "checkpoints")),
            rs.callbacks.CompressionMetrics(run_dir),
        ],
        shuffle=False,
        verbose=2 if first else 0,
    )


def main(argv):
    """Trains on the workers of TF_CONFIG; alone without one."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
    strategy = rs.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(FLAGS.seed)
    text, _ = datasets.text(FLAGS.data_dir)
    alphabet = sorted(set(text))
    if FLAGS.preset:
        with datasets.one_at_a_time():  # one worker downloads, and the others find the files
            keras_hub.models.CausalLM.from_preset(FLAGS.preset)
    with strategy.scope():
        model = build_model(alphabet)
    if FLAGS.preset:
        tokens = np.asarray(model.preprocessor.tokenizer(text), "int32")
        model.preprocessor = None  # `fit` is given tokens
    else:
        number = {c: i for i, c in enumerate(alphabet)}
        tokens = np.array([number[c] for c in text], "int32")
        old, tokens = np.array_split(tokens, 2)
        train_phase(strategy, model, "whole", old)
    with strategy.scope():
        model.backbone.enable_lora(FLAGS.rank)
    train_phase(strategy, model, "lora", tokens)


if __name__ == "__main__":
    app.run(main)
