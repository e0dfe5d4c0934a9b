"""MSTop-k: multi-sampling approximate top-k."""

from __future__ import annotations

import dataclasses

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.config import register
from tf_redsync.exchange import feedback
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.method import Exchange, Payloads, State
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.random_numbers import stream, uniform, worker_seed
from tf_redsync.methods.common.sparsifier import Sparsifier, deliver, selected_payloads
from tf_redsync.ops import MessageLayout, Selection, wire
from tf_redsync.ops.message_layout import unsigned
from tf_redsync.ops.wire import padded


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class MSTopK(Sparsifier):
    """MSTop-k: the k largest elements approximately, by a search for their threshold.

    Shaohuai Shi, Xianhao Zhou, Shutao Song, and others (2021), "Towards Scalable Distributed
    Training of Deep Learning on Public Cloud Clusters", MLSys, arXiv 2010.10458, algorithm 1.

    On every worker, for each tensor, with gradient g and residual v:

        v <- v + g,  a = |v|,  low = 0,  high = 1
        N samplings:  r = (low + high) / 2
                      t = mean(a) + r (max(a) - mean(a))
                      n = number of a >= t
                      n <= k: high = r, and t is the upper threshold if n is the most so far
                      n > k:  low = r, and t is the lower threshold if n is the least so far
        S = all k1 elements that reach the upper threshold, and a block of k - k1 neighbours, from
            a random start, among those that reach only the lower one
        message = [indices of S, values v[S]]           one all-gather
        v[S] <- 0
        total = sum over workers of the messages        scatter-add, rank by rank

    Every step of the search is a sequential pass over memory, which suits GPUs. The last k - k1
    elements are chosen by their position and not by their magnitude, so that S has exactly k.

    Differences from the paper

    * The thresholds start at infinity and 0. So S has k elements even if no sample finds k or fewer
      (equal maxima), or none finds more than k.
    * The search ends when exactly k elements reach a threshold; further samples could not change S.
    * The paper's hierarchical all-gather, within a machine and between machines, is `two_levels` of
      `DistributedOptimizer`, for any method.
    * Biases, norms and small tensors are all-reduced densely.

    Args:
        density: Fraction of the elements that is sent, in (0, 1].
        samplings: N, the maximum number of thresholds to sample.
        seed: Seed of the start of blocks, the same on all workers; each worker draws different
            numbers.
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: If an argument is out of range; the message names it.

    Example:
        >>> MSTopK(density=0.01).describe(TensorSpec("w", (100, 100)))
        '100 of 10,000 elements by 30 samplings'
    """

    samplings: int = 30
    seed: int = 0

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer("samplings", self.samplings, low=1)
        checks.integer("seed", self.seed, low=0)

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Shi, Zhou, Song, and others 2021",
            requests="all-gather of indices and values",
            bits="64 density",
        )

    @override
    def describe(self, spec: TensorSpec) -> str:
        return f"{self.k(spec):,} of {spec.size:,} elements by {self.samplings} samplings"

    @override
    def payloads(self, layout: BucketLayout, step: int) -> Payloads:
        return selected_payloads(MessageLayout.of(self.capacities(layout)))

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        grads = feedback.scaled(grads, ctx.scale)
        sums = [v + g for v, g in zip(state["residual"], grads, strict=True)]
        counts, indices, values, residuals = self.capacities(ctx.layout), [], [], []
        for spec, k, v in zip(ctx.layout.specs, counts, sums, strict=True):
            seed = worker_seed(stream(self.seed, ctx.step, spec.position), ctx.rank)
            vector = tf.reshape(v, [-1])
            chosen = self.select(tf.abs(vector), k, uniform([], seed, tf.float64))
            at = tf.cast(tf.where(chosen)[:k, 0], tf.int32)
            at = padded(at, k)  # fewer than k if the gradient is not finite
            indices.append(at)
            values.append(tf.gather(vector, unsigned(at)))
            residuals.append(tf.reshape(tf.where(chosen, 0.0, vector), spec.shape))
        layout = MessageLayout.of(counts)
        message = layout.message(wire.all_finite(sums), layout.k, indices, values)
        selection = Selection(message, residuals, [], tf.zeros([len(counts)]), layout)
        totals, residuals = yield from deliver(ctx, selection)
        return totals, {"residual": residuals}

    def select(self, a: tf.Tensor, k: int, u: tf.Tensor) -> tf.Tensor:
        """Return a mask of the elements to send, bool `[n]`, exactly `k` of them.

        Args:
            a: Magnitudes, float32 `[n]`.
            k: Number of elements to select.
            u: Relative position of the start of the block, float64 scalar in [0, 1).
        """
        k1, upper, k2, lower = self._thresholds(a, k)
        above = a >= upper
        between = (a >= lower) & ~above
        needed, available = k - k1, k2 - k1
        start = tf.cast(u * tf.cast(available - needed + 1, tf.float64), tf.int64)
        place = tf.cumsum(tf.cast(between, tf.int64), exclusive=True)
        return above | (between & (place >= start) & (place < start + needed))

    def _thresholds(self, a: tf.Tensor, k: int) -> tuple[tf.Tensor, ...]:
        """Return count and value of the upper threshold, and count and value of the lower one."""
        wide = tf.cast(a, tf.float64)
        mean, largest = tf.reduce_mean(wide), tf.reduce_max(wide)

        def sample(
            i: tf.Tensor, low: tf.Tensor, high: tf.Tensor, k1: tf.Tensor, upper: tf.Tensor,
            k2: tf.Tensor, lower: tf.Tensor,
        ) -> tuple[tf.Tensor, ...]:  # fmt: skip
            ratio = (low + high) / 2
            t = tf.cast(mean + ratio * (largest - mean), tf.float32)
            n = tf.math.count_nonzero(a >= t)
            low, high = tf.where(n <= k, low, ratio), tf.where(n <= k, ratio, high)
            more, fewer = (n <= k) & (n > k1), (n > k) & (n < k2)
            k1, upper = tf.where(more, n, k1), tf.where(more, t, upper)
            return i + 1, low, high, k1, upper, tf.where(fewer, n, k2), tf.where(fewer, t, lower)

        zero, one = tf.constant(0.0, tf.float64), tf.constant(1.0, tf.float64)
        none, all_of_them = tf.constant(0, tf.int64), tf.constant(a.shape[0], tf.int64)
        first = (tf.constant(0), zero, one, none, tf.constant(float("inf")), all_of_them)
        *_, k1, upper, k2, lower = tf.while_loop(
            lambda i, low, high, k1, *_: (i < self.samplings) & (k1 < k),
            sample,
            (*first, tf.constant(0.0)),
            parallel_iterations=1,
        )
        return k1, upper, k2, lower
