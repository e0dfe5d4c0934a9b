"""1-bit SGD: two quantized phases with error feedback."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf
from typing_extensions import override

from tf_redsync.config import register
from tf_redsync.contrib.common.quantized_blocks import (
    Blocks,
    by_tensor,
    by_worker,
    cut,
    for_each_worker,
    joined,
    one_message,
)
from tf_redsync.exchange import feedback
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import TensorSpec
from tf_redsync.exchange.method import Exchange, State
from tf_redsync.exchange.requests import AllGather, AllToAll
from tf_redsync.exchange.sync_schedule import SyncSchedule
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.quantizer import Quantizer
from tf_redsync.ops.quantization import dequantize_sum, quantize
from tf_redsync.schedules import DenseWarmUp, check_warm_up, dense_steps

MODE = "two_level"


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class OneBitSGD(Quantizer):
    """1-bit SGD: signs and two means per block, with error feedback.

    Frank Seide, Hao Fu, Jasha Droppo, Gang Li, Dong Yu (2014), "1-Bit Stochastic Gradient Descent
    and its Application to Data-Parallel Distributed Training of Speech DNNs", Interspeech.

    Q replaces every element of a block by a mean: that of the negative elements of the block, or
    that of the others. Every tensor is cut into K blocks, one for each of the K workers. Worker b
    sums block b over all workers and quantizes the sum. On worker w, with gradient g and residual
    e:

        p = g + e
        Q(p[b]) goes to worker b, for every block b             one all-to-all
        e[b] <- p[b] - Q(p[b])                                  for every b other than w
        s = p[w] + sum over the other workers of their Q(p[w])
        Q(s) goes to all workers                                one all-gather
        e[w] <- s - Q(s)
        total = the K blocks Q(s)

    A worker sends 2 (K - 1) / K bits per element. An all-gather of codes would take K - 1.

    Differences from the paper

    * The owner of a block has one residual for it. It does not quantize its own block in the first
      phase, so the only error is that of the second quantization. The paper has a residual for each
      phase.
    * The means are those of the blocks of a tensor, not those of the columns of a matrix.
    * Biases, norms and small tensors are all-reduced densely.
    * The residual is in units of the gradient. The optimizer applies AdaGrad, momentum and similar
      rules afterwards.

    Args:
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.
        warm_up: `None` or `DenseWarmUp(steps)`: dense first steps, which the paper recommends.

    Raises:
        ValueError: If an argument is out of range; the message names it.
    """

    warm_up: DenseWarmUp | None = None

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        check_warm_up(self.warm_up, DenseWarmUp)

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Seide, Fu, Droppo, Li, Yu 2014",
            requests="all-to-all, then all-gather, of signs and means",
            bits="1 + 1 / K",
            state_kinds={"residual": "sum"},
            # Each total is a mean from one worker, which has checked it for overflow
            totals_may_overflow=False,
        )

    @property
    @override
    def sync_schedule(self) -> SyncSchedule:
        return SyncSchedule(warm_up_steps=dense_steps(self.warm_up))

    @override
    def describe(self, spec: TensorSpec) -> str:
        return "signs and two means in both phases"

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        grads = feedback.scaled(grads, ctx.scale)
        sums = [e + g for e, g in zip(state["residual"], grads, strict=True)]
        return (yield from one_bit_sum(sums, ctx))


def one_bit_sum(
    sums: list[tf.Tensor], ctx: Context, seen: list[tf.Tensor] | None = None
) -> Exchange:
    """Sum tensors over the workers in two phases of one bit, as `OneBitSGD` does.

    Args:
        sums: This worker's summands plus its residuals.
        ctx: Context of the bucket.
        seen: Bool masks in the shapes of `sums`, equal on all workers, or `None` for all elements.
            The other elements must be 0. They are not counted in the means. Their totals and
            residuals are unspecified.

    Returns:
        The totals, and a state with the new residuals.
    """
    workers, rank, specs = ctx.layout.workers, ctx.rank, ctx.layout.specs
    blocks = [cut(x, s, workers) for x, s in zip(sums, specs, strict=True)]
    counted = _Counted.of(specs, workers, seen)

    message, errors = _quantized(blocks, counted.numbers)
    rows = yield AllToAll(for_each_worker(message, 2 * len(blocks), workers))
    received = dequantize_sum(rows, [b[0] for b in blocks], mode=MODE)
    own_sums = [  # sums of this worker's block, its own part without quantization
        tf.where(inside, total + tf.gather(error, rank), 0.0)[tf.newaxis]
        for inside, total, error in zip(counted.inside(rank, blocks), received, errors, strict=True)
    ]
    message, own_errors = _quantized(own_sums, tf.gather(counted.numbers, [rank], axis=1))
    messages = yield AllGather(message)
    together = one_message(messages, 2 * len(blocks))
    parts = dequantize_sum(together, by_worker(blocks), mode=MODE)
    totals = by_tensor(parts, len(blocks))
    is_own = tf.equal(tf.range(workers), rank)[:, tf.newaxis]
    residuals = [
        tf.where(is_own, own_error, error)
        for error, own_error in zip(errors, own_errors, strict=True)
    ]
    return joined(totals, ctx.layout), {"residual": joined(residuals, ctx.layout)}


class _Counted(NamedTuple):
    """The elements that the means of blocks count: not the padding, and only `seen` ones.

    Attributes:
        numbers: int32 `[tensors, workers]`, their number in each block.
        masks: Bool `[workers, length]` for each tensor; `None` for all but the padding.
    """

    numbers: tf.Tensor
    masks: Blocks | None

    @classmethod
    def of(
        cls, specs: Sequence[TensorSpec], workers: int, seen: list[tf.Tensor] | None
    ) -> _Counted:
        """Return those of all elements, or of `seen` ones."""
        if seen is None:
            return cls(tf.constant([_counts(s, workers) for s in specs]), None)
        both = zip(seen, specs, strict=True)
        masks = [cut(tf.cast(m, tf.float32), s, workers) > 0.0 for m, s in both]
        numbers = [tf.math.count_nonzero(m, axis=1, dtype=tf.int32) for m in masks]
        return cls(tf.stack(numbers), masks)

    def inside(self, rank: tf.Tensor, blocks: Blocks) -> list[tf.Tensor]:
        """Return the mask of a worker's block of each tensor, bool `[length]`."""
        if self.masks is not None:
            return [tf.gather(m, rank) for m in self.masks]
        counts = tf.unstack(tf.cast(tf.gather(self.numbers, rank, axis=1), tf.int64))
        lengths = [b.shape[1] for b in blocks]
        return [
            tf.range(n, dtype=tf.int64) < count for n, count in zip(lengths, counts, strict=True)
        ]


def _counts(spec: TensorSpec, workers: int) -> list[int]:
    """Return the number of elements of a tensor in each of its blocks, without padding."""
    length = -(-spec.size // workers)
    return [min(max(spec.size - b * length, 0), length) for b in range(workers)]


def _quantized(blocks: Blocks, counts: tf.Tensor) -> tuple[tf.Tensor, Blocks]:
    """Quantize blocks to two means each.

    Args:
        blocks: Some blocks of every tensor, each `[blocks, length]`, padded with zeros.
        counts: int32 `[tensors, blocks]`, numbers of counted elements; the others are 0.

    Returns:
        The message, in the order of `by_worker`, and the errors in the form of `blocks`.
    """
    scales = tf.stack([_means(b, counts[i]) for i, b in enumerate(blocks)], axis=1)
    coded = quantize(by_worker(blocks), tf.reshape(scales, [-1]), mode=MODE, errors=True)
    errors = by_tensor(coded.errors, len(blocks))
    return coded.message, errors


def _means(rows: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
    """Return the means of the negative and the other counted elements of rows: `[rows, 2]`."""
    negative = rows < 0.0
    below = tf.math.count_nonzero(negative, axis=1, dtype=tf.int32)
    numbers = tf.cast(tf.stack([below, counts - below], axis=1), tf.float32)
    low = tf.reduce_sum(tf.minimum(rows, 0.0), axis=1)
    high = tf.reduce_sum(tf.maximum(rows, 0.0), axis=1)
    return tf.math.divide_no_nan(tf.stack([low, high], axis=1), numbers)
