"""SparDL: sparse reduce-scatter and all-gather."""

from __future__ import annotations

import dataclasses

import tensorflow as tf
from typing_extensions import override

from tf_redsync import ops
from tf_redsync.config import register
from tf_redsync.exchange import feedback
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout
from tf_redsync.exchange.method import Exchange, State
from tf_redsync.exchange.requests import AllGather, AllToAll
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.sparsifier import (
    Sparsifier,
    element_count,
    flat,
    message_coding,
    split,
)
from tf_redsync.ops import wire
from tf_redsync.ops.message_layout import MessageLayout
from tf_redsync.ops.wire import map_words, only_row


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class SparDL(Sparsifier):
    """SparDL: sparse reduce-scatter and all-gather, for any number of workers.

    Minjun Zhao, Yichen Yin, Yuren Mao, Qing Liu, Lu Chen, Yunjun Gao (2024), "SparDL: Distributed
    Deep Learning Training with Efficient Sparse Communication", ICDE, arXiv 2304.00737.

    With top-k and an all-gather every worker sends its k elements to each of the K - 1 others, and
    the total may have K k of them. SparDL shares the reduction. The gradients of a bucket are a
    vector of n elements, cut into K blocks of ceil(n / K), and worker b sums block b. With gradient
    g, residual v, density k / n, and top(X) the k / K largest elements of a block X, on every
    worker:

        S = v + g
        top(S[b]) goes to worker b, for every block b          one all-to-all
        R[b] = S[b] - top(S[b])
        on worker w:  T = R[w] + sum of the received blocks    including its own top(S[w])
                      top(T) goes to all workers               one all-gather
                      R[w] = T - top(T)
        total = the K blocks that were gathered, k elements
        v[j] <- R[j] where total[j] is not 0, else S[j]

    The last line is the paper's global residual collection: an element that was sent, but is not in
    the total, returns to the residuals of all workers that sent it.

    A worker sends 2 k (K - 1) / K words in each of the two collectives. The sum, 4 k (K - 1) / K,
    is almost independent of K. An all-gather of k elements takes 2 k (K - 1).

    Differences from the paper

    * The reduce-scatter is one all-to-all. The paper has ceil(log2 K) rounds, in which workers
      forward partial sums and cut them to their k / K largest elements each time. In both a worker
      sends K - 1 blocks of k / K elements, so the volume is that of the paper. The rounds as
      all-to-alls, whose rows have equal lengths, would send up to K times more. The cost is
      latency: K - 1 messages at a time instead of one in each of ceil(log2 K) rounds. On random
      gradients the error of the total is within 2 % of that of the paper's rounds.
    * There are no teams of workers (Spar-All-Gather with d > 1 in the paper).
    * The blocks are those of a bucket, not of the model. A selection by blocks does not compare
      elements of different blocks anyway, and buckets overlap with the backward pass. Biases, norms
      and small tensors are all-reduced densely.

    A coding around it, such as `HalfPrecision`, traces one encoder per worker, so a step takes
    longer to trace with more workers.

    Args:
        density: Fraction of the elements of a bucket in the total, in (0, 1]. A block of L elements
            sends `max(1, round(density L))`.
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: If an argument is out of range; the message names it.
    """

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Zhao, Yin, Mao, Liu, Chen, Gao 2024",
            requests="all-to-all, then all-gather, of indices and values",
            bits="64 density (1 + 1 / K)",
            # Each element comes from one worker, which has checked its sums for overflow
            totals_may_overflow=False,
        )

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        sums = _blocks(
            flat(state["residual"]) + flat(feedback.scaled(grads, ctx.scale)), ctx.layout
        )
        workers, length = sums.shape
        k = element_count(self.density, length)
        like = tf.unstack(sums)

        rows, rests = _select([tf.zeros_like(b) for b in like], like, k, ctx)
        rows, plain = _read((yield AllToAll(rows)), k, like[0], ctx)
        (received,) = ops.decode(rows, plain, like[:1])
        rows, (rest,) = _select([received], [tf.gather(rests, ctx.rank)], k, ctx, workers)
        messages, plain = _read((yield AllGather(only_row(rows))), k, like[0], ctx)
        of_all = MessageLayout.of(plain.capacities * workers)
        total = tf.stack(ops.decode(_one_message(messages), of_all, like))

        is_own = tf.range(workers)[:, tf.newaxis] == ctx.rank
        delivered = tf.where(is_own, rest, tf.stack(rests))  # 0, or the rounding error
        residual = tf.where(tf.not_equal(total, 0.0), delivered, sums)
        totals, residuals = (_tensors(blocks, ctx.layout) for blocks in (total, residual))
        return totals, {"residual": residuals}


def _select(
    grads: list[tf.Tensor],
    residuals: list[tf.Tensor],
    k: int,
    ctx: Context,
    first: int = 0,
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Return a message with the k largest elements of each `grads + residuals`, and residuals.

    Args:
        grads: Gradients, float32.
        residuals: Residuals, float32.
        k: Number of elements to select of each tensor.
        ctx: Context of the exchange.
        first: Number of the first message among this worker's messages in the step, for the random
            streams of codings.
    """
    n, coding = len(grads), message_coding(ctx)
    selection = ops.accumulate_and_select(grads, residuals, [], [k] * n)
    rests = list(selection.residuals)
    rows = map_words(lambda m: tf.unstack(m, num=n), _rows(selection.message, n))
    if coding is not None:
        for i, (row, rest) in enumerate(zip(rows, rests, strict=True)):
            row_coding = coding.for_message(first + i)
            rows[i], (rests[i],) = row_coding.encode(row, [rest], MessageLayout.of([k]))
    return map_words(lambda *each: tf.stack(each), *rows), rests


def _read(
    messages: tf.Tensor, k: int, block: tf.Tensor, ctx: Context
) -> tuple[tf.Tensor, MessageLayout]:
    """Return messages of one block each after decoding their values and indices, and the layout."""
    coding, layout = message_coding(ctx), MessageLayout.of([k])
    return (messages, layout) if coding is None else coding.decode(messages, [block], layout)


def _rows(message: tf.Tensor, blocks: int) -> tf.Tensor:
    """Split a message of all blocks into one message for each, `[blocks, words]`."""

    def apart(message: tf.Tensor) -> tf.Tensor:
        flags = tf.fill([blocks, 1], message[0])
        return tf.concat([flags, tf.reshape(message[1:], [blocks, -1])], axis=1)

    return map_words(apart, message)


def _one_message(messages: tf.Tensor) -> tf.Tensor:
    """Join messages of one block each, `[workers, words]`, into one of all blocks, `[1, ...]`."""
    words = map_words(lambda m: tf.reshape(m[:, 1:], [-1]), messages)
    return wire.as_one(messages, words)


def _blocks(vector: tf.Tensor, layout: BucketLayout) -> tf.Tensor:
    """Return a bucket's vector as one block per worker, `[workers, length]`, padded with zeros."""
    length = -(-sum(s.size for s in layout.specs) // layout.workers)
    padded = tf.pad(vector, [[0, layout.workers * length - vector.shape[0]]])
    return tf.reshape(padded, [layout.workers, length])


def _tensors(blocks: tf.Tensor, layout: BucketLayout) -> list[tf.Tensor]:
    """Undo `_blocks` and `flat`."""
    return split(tf.reshape(blocks, [-1])[: sum(s.size for s in layout.specs)], layout.specs)
