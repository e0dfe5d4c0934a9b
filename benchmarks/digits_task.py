"""A small task that every method trains: a 64-256-128-10 network on scikit-learn's digits.

All workers are in this process. They read shares of each batch, and the loopback answers their
exchanges, so a step is what worker processes would compute.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tf_redsync.exchange import loopback, wire
from tf_redsync.exchange.layout import TensorSpec, make_buckets
from tf_redsync.policy import Policy

WIDTHS = (64, 256, 128, 10)
TEST = 300


class Digits:
    """The data and the network.

    Args:
        workers: Among which each batch is divided.
        batch: Examples of a worker and step.
        seed: Of the weights and the order of the examples.
    """

    def __init__(self, workers: int, batch: int = 32, seed: int = 0):
        from sklearn.datasets import load_digits

        digits = load_digits()
        x, y = np.float32(digits.data / 16), np.int64(digits.target)
        order = np.random.default_rng(0).permutation(len(y))  # the test set is always the same
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
        """Returns initial weights: normal, of variance 2 / inputs; biases 0."""
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

    def _grads(self, weights, rows):
        """Every worker's gradients of its loss divided by the number of workers, as in Keras."""
        result = []
        for own in tf.unstack(rows):
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


def train(task: Digits, method, learning_rate: float, steps: int) -> dict[str, Any]:
    """Trains with SGD.

    Args:
        task: The task.
        method: Exchanges the gradients; tensors that it refuses go to its dense method.
        learning_rate: Of SGD.
        steps: How many.

    Returns:
        `losses` of 20 times during the training, `loss` and `accuracy` at its end; `bits` that a
        worker contributes to its collectives, per element and step, and `sent_bytes` that it sends
        per step at the costs of ring collectives, both from the requests; `skipped` steps.
    """
    pairs = [(a.spec, a.method) for a in Policy(default=method).assign(task.specs)]
    buckets = make_buckets(pairs, task.workers)
    states = [loopback.initial_states(b.method, b.layout) for b in buckets]
    runs = [
        {p: loopback.traced_step(b.method, b.layout, p) for p in ("exchange", "dense_exchange")}
        for b in buckets
    ]
    weights, losses = task.weights(), []
    payload = sent = skipped = 0.0
    for number, rows in enumerate(task.batches(steps)):
        grads = task.grads(weights, tf.constant(rows))
        outcomes = []
        for bucket, run, state in zip(buckets, runs, states, strict=True):
            own = [[g[s.position] for s in bucket.layout.specs] for g in grads]
            warm = number < bucket.method.warm_up_steps
            outcomes.append(run["dense_exchange" if warm else "exchange"](own, state, number))
        payload += sum(int(wire.payload_bytes(r)) for o in outcomes for r in o.requests)
        sent += sum(o.bytes_sent for o in outcomes)
        if all(o.finite for o in outcomes):
            states = [o.states for o in outcomes]
            for bucket, outcome in zip(buckets, outcomes, strict=True):
                for spec, total in zip(bucket.layout.specs, outcome.totals[0], strict=True):
                    weights[spec.position] -= learning_rate * total
        else:
            skipped += 1
        if (number + 1) % max(1, steps // 20) == 0:
            losses.append(float(task.scores(weights)[0]))
    loss, accuracy = task.scores(weights)
    return {
        "loss": float(loss),
        "accuracy": float(accuracy),
        "losses": losses,
        "bits": 8 * payload / steps / task.elements,
        "sent_bytes": sent / steps,
        "skipped": int(skipped),
    }
