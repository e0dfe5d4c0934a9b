"""Trains an LSTM on words: truncated backpropagation through time, and clipping on each worker.

    python -m tf_redsync launch -n 2 examples/language_model.py
    ... --data_dir=ptb --width=650 --run_dir=runs/ptb

`ptb` holds ptb.train.txt and ptb.valid.txt; without --data_dir it reads the topics of Python's own
help. Each worker reads streams of text of its own, and the LSTM's state goes on from one batch to
the next. Started again, it goes on from its last checkpoint.
"""

import collections
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
# Before the exchange each worker's whole gradient is clipped to clip_norm / sqrt(workers), as in
# Deep Gradient Compression, section 3.2: a bound for the sum cannot be known before it.
tf_redsync.flags.define(
    exchange="CodedTopK(density=0.03, clip_norm=0.25)", run_dir="runs/language_model"
)
flags.DEFINE_string("data_dir", None, "A text file, or a folder with ptb.train.txt and so on.")
flags.DEFINE_integer("epochs", 4, "Passes over the text, in all.")
flags.DEFINE_integer("batch_size", 10, "Streams of text per worker, or per GPU of a worker.")
flags.DEFINE_integer("window", 35, "Words between two updates.")
flags.DEFINE_integer("words", 5000, "Size of the vocabulary; others are <unk>.")
flags.DEFINE_integer("width", 128, "Of the embedding and of both LSTM layers.")
flags.DEFINE_float("learning_rate", 10.0, "Of SGD at the start; it falls as a cosine.")
flags.DEFINE_integer("seed", 1, "Of the weights.")


class LanguageModel(keras.Model):
    """Two LSTM layers whose state goes on from batch to batch while they are trained.

    The state is each replica's own (`ON_READ`), for streams of its own, not in checkpoints.
    """

    def __init__(self, words: int):
        super().__init__()
        self.embedding = layers.Embedding(words, FLAGS.width)
        options = {"return_sequences": True, "return_state": True}
        self.cells = [layers.LSTM(FLAGS.width, **options) for _ in range(2)]
        self.logits = layers.Dense(words)
        own = tf.VariableSynchronization.ON_READ, tf.VariableAggregation.ONLY_FIRST_REPLICA
        self.carried = [
            tf.Variable(
                tf.zeros([FLAGS.batch_size, FLAGS.width]),
                trainable=False,
                synchronization=own[0],
                aggregation=own[1],
            )
            for _ in range(4)
        ]

    def call(self, words, training=False):
        """Logits of the next words, [batch, window, words], of words [batch, window]."""
        x = self.embedding(words)
        for cell, (h, c) in zip(self.cells, (self.carried[:2], self.carried[2:]), strict=True):
            # While it is built and evaluated it begins with zeros.
            x, *state = cell(
                x, initial_state=[h.read_value(), c.read_value()] if training else None
            )
            if training:
                h.assign(state[0])
                c.assign(state[1])
        return self.logits(x)


class Perplexity(keras.metrics.SparseCategoricalCrossentropy):
    """exp of the mean cross-entropy of a word."""

    def result(self):
        """See the class."""
        return keras.ops.exp(super().result())


class Forget(keras.callbacks.Callback):
    """Sets the state to zero where the text begins anew."""

    def on_epoch_begin(self, epoch, logs=None):
        """Each worker its own."""
        for variable in self.model.carried:
            variable.assign(tf.zeros_like(variable))


def streams(words: np.ndarray, part: int, parts: int):
    """A replica's windows, [steps, batch, window] of words and of their successors."""
    rows = FLAGS.batch_size * parts
    length = (len(words) - 1) // rows // FLAGS.window * FLAGS.window

    def cut(offset):
        table = words[offset : offset + rows * length].reshape(rows, length)
        own = table[part * FLAGS.batch_size : (part + 1) * FLAGS.batch_size]
        return own.reshape(FLAGS.batch_size, -1, FLAGS.window).swapaxes(0, 1)

    return cut(0), cut(1)


def in_turn(words: np.ndarray, context: tf.distribute.InputContext):
    """The windows of a worker's replicas: in each step the first replica's, the second's, ..."""
    replicas = context.num_replicas_in_sync // context.num_input_pipelines
    first = replicas * context.input_pipeline_id
    own = [streams(words, first + i, context.num_replicas_in_sync) for i in range(replicas)]
    return tuple(
        np.stack(parts, 1).reshape(-1, *parts[0].shape[1:]) for parts in zip(*own, strict=True)
    )


def main(argv):
    """Trains on the workers of TF_CONFIG; alone without one."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
    strategy = rs.MultiWorkerMirroredStrategy()
    workers, first = strategy.num_replicas_in_sync, rs.rank() == 0
    keras.utils.set_random_seed(FLAGS.seed)
    texts = [t.replace("\n", " <eos> ").split() for t in datasets.text(FLAGS.data_dir)]
    common = collections.Counter(texts[0]).most_common(FLAGS.words - 1)
    number = {word: i for i, (word, _) in enumerate(common, 1)}
    train, test = (np.array([number.get(w, 0) for w in t], "int32") for t in texts)
    steps = len(streams(train, 0, workers)[0])
    if not steps:
        raise app.UsageError(
            f"--batch_size={FLAGS.batch_size} on {workers} workers leaves no window of "
            f"{FLAGS.window} words a stream: the text has {len(train)}."
        )
    if len(test) <= FLAGS.window:
        raise app.UsageError(
            f"--window={FLAGS.window} must be less than the words to test with, {len(test)}."
        )

    with strategy.scope():
        model = LanguageModel(len(number) + 1)
        model(np.zeros((1, FLAGS.window), "int32"))  # builds it
        length = max(1, steps * FLAGS.epochs)
        rate = keras.optimizers.schedules.CosineDecay(FLAGS.learning_rate, length)
        optimizer = rs.DistributedOptimizer(
            keras.optimizers.SGD(rate), **tf_redsync.flags.exchange()
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=[Perplexity(name="perplexity", from_logits=True)])

    def each_worker(context):
        """Its own streams."""
        return tf.data.Dataset.from_tensor_slices(in_turn(train, context)).repeat().prefetch(2)

    model.fit(
        strategy.distribute_datasets_from_function(each_worker),
        epochs=FLAGS.epochs,
        steps_per_epoch=steps,
        callbacks=[
            Forget(),
            rs.callbacks.Checkpoint(os.path.join(FLAGS.run_dir, "checkpoints")),
            rs.callbacks.CompressionMetrics(FLAGS.run_dir),
        ],
        shuffle=False,
        verbose=2 if first else 0,
    )
    whole = len(test) // (FLAGS.window + 1) * (FLAGS.window + 1)
    rows = test[:whole].reshape(-1, FLAGS.window + 1)
    _, perplexity = model.evaluate(rows[:, :-1], rows[:, 1:], batch_size=20, verbose=0)
    if first:
        print(f"test perplexity {perplexity:.1f} a word, without context before", flush=True)
        model.save_weights(os.path.join(FLAGS.run_dir, "language_model.weights.h5"))


if __name__ == "__main__":
    app.run(main)
