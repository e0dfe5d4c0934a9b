"""Loss and metric on the test set."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.accuracy.data import Data
from benchmarks.accuracy.tasks import Settings
from benchmarks.accuracy.translation import Bleu

TEST_BATCH = 250


class Diverged(RuntimeError):
    """The loss is not finite."""


class Evaluation:
    """Loss and metric on the test set."""

    def __init__(self, settings: Settings, found: Data, model: Any):
        self.found, self.metric, self.model = found, settings.of_task.metric, model
        self._sums = tf.function(self._batches, autograph=False)
        self._bleu = Bleu(found, model) if self.metric == "BLEU" else None
        self.side_by_side = settings.workers

    def _batches(self, *pairs):
        """Sums over some batches, which are computed concurrently."""
        losses, hits = [], []
        for x, y in pairs:
            logits = self.model(x, training=False)
            found = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(y, 0), logits)
            losses.append(tf.reduce_sum(tf.where(y < 0, 0.0, found)))
            right = tf.equal(tf.argmax(logits, -1, tf.int32), y)
            hits.append(tf.reduce_sum(tf.cast(right, tf.float32)))
        return tf.add_n(losses), tf.add_n(hits)

    def __call__(self) -> dict[str, float]:
        """Returns `loss`, and `metric`: accuracy in percent, BLEU, or the perplexity.

        Raises:
            Diverged: for a loss that is not finite.
        """
        x, y = self.found.test
        parts = [slice(i, i + TEST_BATCH) for i in range(0, len(y), TEST_BATCH)]
        sums = np.zeros(2)
        for i in range(0, len(parts), self.side_by_side):
            some = parts[i : i + self.side_by_side]
            pairs = [(tf.constant(self.found.inputs(x[p])), tf.constant(y[p])) for p in some]
            sums += [float(s) for s in self._sums(*pairs)]
        loss, share = sums / np.sum(y >= 0)
        if not math.isfinite(loss):
            raise Diverged("the loss on the test set is not finite")
        if self._bleu is not None:
            metric = self._bleu()
        else:
            metric = 100 * share if self.metric == "accuracy" else math.exp(min(loss, 50.0))
        return {"loss": float(loss), "metric": float(metric)}
