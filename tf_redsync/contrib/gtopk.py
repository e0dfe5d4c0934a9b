"""gTop-k: top-k of the sum of all workers' top-k selections."""

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
from tf_redsync.ops.wire import as_row, map_words


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class GTopK(Sparsifier):
    """gTop-k: the k largest elements of the sum of all workers' top-k, by recursive doubling.

    Shaohuai Shi, Qiang Wang, Kaiyong Zhao, Zhenheng Tang, Yuxin Wang, Xiang Huang, Xiaowen Chu
    (2019), "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low
    Bandwidth Networks", ICDCS, arXiv 1901.04359.

    With top-k and an all-gather every worker receives the k elements of all K workers, and the
    total may have K k of them. gTop-k merges the messages of two workers into one of k elements,
    in each of log2(K) rounds. The gradients of a bucket are a vector of n elements. With gradient
    g, residual v, density k / n, and top(x) the k elements of x of largest magnitude:

        v <- v + g;   x = top(v) of this worker
        in every round:  x <- top(x + the partner's x)            both partners compute the same
        total = x after the last round
        v[j] <- 0 where x[j] was sent, and was kept in every round

    A worker sends 2 k log2(K) words, whereas the paper's tree and broadcast take 4 k log2(K) on
    their longest path. Memory and time of a round depend on k and not on n. With K = 2^m workers
    the total has the same bits on all of them; other K take two more rounds, see
    `common/recursive_doubling.py`.

    Differences from the paper

    * Both partners of a round compute the sum, as in recursive doubling, so there is no broadcast.
      The partial sums are those of the paper's tree.
    * The paper returns a sent element to the residual if the total lacks it. An element that one
      partial sum dropped, but that reaches the total through another branch, is lost there: its
      sender treats it as delivered. Here a worker keeps the elements that were dropped in any of
      its own rounds, so the gradient is conserved.
    * If K is not a power of two, some workers first merge the message of a second worker. Such a
      worker keeps the elements that this merge dropped.
    * The vector is a bucket, not the model. Biases, norms and small tensors are all-reduced
      densely.

    Args:
        density: Fraction of a bucket's elements that a worker selects and that the total has, in
            (0, 1].
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: If an argument is out of range; the message names it.

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
        selection = ops.accumulate_and_select(
            [vector], [flat(state["residual"])], [], [k], scale=ctx.scale
        )
        message, residual, layout = selection.message, selection.residuals[0], selection.layout

        first, doubling, last = recursive_doubling.rounds(ctx.layout.workers)
        if first is not None:
            rows = yield PairGather(message, first)
            taken = recursive_doubling.merged(rows, layout, [size], layout)
            residual = _restore_undelivered(residual, message, [taken], layout)
            message = recursive_doubling.after_first_round(taken, ctx.rank, first)
        sums, later = message, []
        for distance in doubling:
            rows = yield PairGather(sums, distance)
            sums = recursive_doubling.merged(rows, layout, [size], layout)
            later.append(sums)
        residual = _restore_undelivered(residual, message, later, layout)
        if last is not None:
            sums = map_words(lambda rows: rows[0], (yield PairGather(sums, last)))
        totals = ops.decode(as_row(sums), layout, [residual])
        totals = split(recursive_doubling.nan_unless_finite(sums, totals)[0], ctx.layout.specs)
        return totals, {"residual": split(residual, ctx.layout.specs)}


def _restore_undelivered(
    residual: tf.Tensor, sent: tf.Tensor, later: Sequence[tf.Tensor], layout: MessageLayout
) -> tf.Tensor:
    """Add to the residual those elements of a message that some of the later messages lack.

    Args:
        residual: float32 `[n]`.
        sent: The message of this worker.
        later: The merged messages of the rounds.
        layout: Layout of all messages.
    """
    size, (k,) = residual.shape[0], layout.capacities
    at, values = _elements(sent, layout, size)
    delivered = at < size
    for message in later:
        positions, _ = _elements(message, layout, size)
        place = tf.minimum(tf.searchsorted(positions, at, out_type=tf.int64), k - 1)
        delivered &= tf.equal(tf.gather(positions, place), at)
    values = tf.where(delivered, 0.0, values)  # 0 in unused slots, so their position is irrelevant
    at = tf.minimum(at, size - 1)
    return tf.tensor_scatter_nd_add(residual, at[:, tf.newaxis], values)


def _elements(message: tf.Tensor, layout: MessageLayout, size: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Return positions, int64, and values of a message; `size` is the position of unused slots."""
    parts = layout.split(message)
    at = recursive_doubling.positions(parts.indices[0], parts.counts[0], size)
    return at, parts.values[0]
