"""A small task that every method trains: a 64-256-128-10 network on scikit-learn's digits."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tf_redsync.exchange.layout import TensorSpec

WIDTHS = (64, 256, 128, 10)
TEST = 300


class Digits:
    """The data and the network.

    Args:
        workers: Number of workers that share each batch.
        batch: Examples per worker and step.
        seed: Seed of the weights and the order of the examples.
    """

    def __init__(self, workers: int, batch: int = 32, seed: int = 0):
        from sklearn.datasets import load_digits

        digits = load_digits()
        x, y = np.float32(digits.data / 16), np.int64(digits.target)
        order = np.random.default_rng(0).permutation(len(y))  # a fixed test set
        self.test = tuple(tf.constant(a[order[:TEST]]) for a in (x, y))
        self.train = tuple(tf.constant(a[order[TEST:]]) for a in (x, y))
        self.workers, self.batch, self.seed = workers, batch, seed
        shapes = [s for n, m in zip(WIDTHS[:-1], WIDTHS[1:], strict=True) for s in ((n, m), (m,))]
        self.specs = [TensorSpec(f"layer/{i}", s, position=i) for i, s in enumerate(shapes)]
        self.grads = tf.function(self._grads)
        self.scores = tf.function(self._scores)

    @property
    def elements(self) -> int:
        """Number of weights."""
        return sum(s.size for s in self.specs)

    def weights(self) -> list[tf.Tensor]:
        """Returns initial weights: normal with variance 2 / inputs; biases 0."""
        rng = np.random.default_rng(self.seed)
        return [
            tf.constant(rng.standard_normal(s.shape) * (2 / s.shape[0]) ** 0.5, tf.float32)
            if len(s.shape) == 2
            else tf.zeros(s.shape)
            for s in self.specs
        ]

    def batches(self, steps: int) -> np.ndarray:
        """Returns the examples of every step and worker, `[steps, workers, batch]`."""
        rng = np.random.default_rng(self.seed + 1)
        size = self.workers * self.batch
        per_epoch = len(self.train[1]) // size
        epochs = -(-steps // per_epoch)
        rows = [rng.permutation(len(self.train[1]))[: per_epoch * size] for _ in range(epochs)]
        return np.concatenate(rows).reshape(-1, self.workers, self.batch)[:steps]

    def _logits(self, weights, x):
        for i in range(0, len(weights), 2):
            x = tf.matmul(x, weights[i]) + weights[i + 1]
            x = tf.nn.relu(x) if i + 2 < len(weights) else x
        return x

    def _loss(self, weights, x, y):
        logits = self._logits(weights, x)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))

    def _grads(self, points, rows):
        """Every worker's gradients of its loss divided by the number of workers, as in Keras."""
        result = []
        for weights, own in zip(points, tf.unstack(rows), strict=True):
            with tf.GradientTape() as tape:
                tape.watch(weights)
                batch = [tf.gather(a, own) for a in self.train]
                loss = self._loss(weights, *batch) / self.workers
            result.append(tape.gradient(loss, weights))
        return result

    def _scores(self, weights):
        """Loss on all training examples, accuracy on the test examples."""
        found = tf.argmax(self._logits(weights, self.test[0]), axis=1)
        accuracy = tf.reduce_mean(tf.cast(tf.equal(found, self.test[1]), tf.float32))
        return self._loss(weights, *self.train), accuracy
