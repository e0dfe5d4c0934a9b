"""Top-k of the sum of all workers' top-k."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf
from typing_extensions import override

from tf_redsync import ops
from tf_redsync.config import register
from tf_redsync.contrib.common import recursive_doubling
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.method import Exchange, State
from tf_redsync.exchange.requests import PairGather
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.sparsifier import Sparsifier, element_count, flat, split
from tf_redsync.ops import MessageLayout
from tf_redsync.ops.wire import as_row, moved


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class GTopK(Sparsifier):
    """gTop-k: the k largest of the sums of all workers' k largest elements, found in a tree.

    Shaohuai Shi, Qiang Wang, Kaiyong Zhao, Zhenheng Tang, Yuxin Wang, Xiang Huang, Xiaowen Chu
    (2019), "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low
    Bandwidth Networks", ICDCS, arXiv 1901.04359.

    With top-k and an all-gather every worker receives the k elements of all K workers, and the
    total may have K k of them. Here two workers' messages are merged into one of k elements, and
    again, so that each of log2(K) rounds costs k elements. The gradients of a bucket are a vector
    of n elements. With gradient g, residual v, density k / n, and top(x) the k elements of x of
    largest magnitude:

        v <- v + g;   x = top(v) of this worker
        in every round:  x <- top(x + the partner's x)            both partners compute the same
        total = x after the last round
        v[j] <- 0 where x[j] was sent, and was kept in every round

    A worker sends 2 k log2(K) words, where the paper's tree and broadcast take 4 k log2(K) on its
    longest path. Memory and time of a round are those of k elements, not of n. With K = 2^m workers
    the total is, bit for bit, the same on all of them; other K take two rounds more, see
    `common/recursive_doubling.py`.

    Differences from the paper

    * Both partners of a round add up, as in recursive doubling, so that nothing is to be broadcast.
      The partial sums are those of the paper's tree.
    * The paper returns a sent element to the residual if it is missing in the total. An element
      that a partial sum has lost on the way, and that reaches the total by another branch, is lost
      there: its sender takes it for delivered. Here a worker keeps what was dropped in any of its
      own rounds, so the gradient is conserved.
    * Where K is no power of two, a worker that was handed another one's elements keeps what is
      dropped of the sum of both.
    * The vector is a bucket, not the model. Small tensors, biases and norms are all-reduced
      densely.

    Args:
        density: Fraction of a bucket's elements that a worker selects and that the total has, in
            (0, 1].
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: for a hyper-parameter out of its range.

    Example:
        >>> GTopK(density=0.001).density
        0.001
    """

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Shi, Wang, Zhao, Tang, Wang, Huang, Chu 2019",
            requests="log2(K) exchanges with a partner, of indices and values",
            bits="64 density log2(K)",
            rounds_values=False,
            sends_selected=False,
        )

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        size = sum(s.size for s in ctx.layout.specs)
        k = element_count(self.density, size)
        if not k:
            return grads, state
        vector = flat(grads)
        found = ops.accumulate_and_select(
            [vector], [flat(state["residual"])], [], [k], scale=ctx.scale
        )
        own, residual, layout = found.message, found.residuals[0], found.layout

        first, doubling, last = recursive_doubling.rounds(ctx.layout.workers)
        if first is not None:
            rows = yield PairGather(own, first)
            taken = recursive_doubling.merged(rows, layout, [size], layout)
            residual = _put_back(residual, own, [taken], layout)
            own = recursive_doubling.handed_over(taken, ctx.rank, first)
        sums, kept = own, []
        for distance in doubling:
            rows = yield PairGather(sums, distance)
            sums = recursive_doubling.merged(rows, layout, [size], layout)
            kept.append(sums)
        residual = _put_back(residual, own, kept, layout)
        if last is not None:
            sums = moved(lambda rows: rows[0], (yield PairGather(sums, last)))
        totals = ops.decode(as_row(sums), layout, [residual])
        totals = split(recursive_doubling.stopping(sums, totals)[0], ctx.layout.specs)
        return totals, {"residual": split(residual, ctx.layout.specs)}


def _put_back(
    residual: tf.Tensor, own: tf.Tensor, kept: Sequence[tf.Tensor], layout: MessageLayout
) -> tf.Tensor:
    """Add to the residual those elements of a message that are not in all of others.

    Args:
        residual: float32 `[n]`.
        own: The message.
        kept: The others.
        layout: Of all of them.
    """
    size, (k,) = residual.shape[0], layout.capacities
    at, values = _elements(own, layout, size)
    delivered = at < size
    for message in kept:
        there, _ = _elements(message, layout, size)
        place = tf.minimum(tf.searchsorted(there, at, out_type=tf.int64), k - 1)
        delivered &= tf.equal(tf.gather(there, place), at)
    values = tf.where(delivered, 0.0, values)  # 0 in unused slots, at a position of no account
    at = tf.minimum(at, size - 1)
    return tf.tensor_scatter_nd_add(residual, at[:, tf.newaxis], values)


def _elements(message: tf.Tensor, layout: MessageLayout, size: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Positions, int64, and values of a message; unused slots have the position `size`."""
    parts = layout.split(message)
    at = recursive_doubling.positions(parts.indices[0], parts.counts[0], size)
    return at, parts.values[0]
