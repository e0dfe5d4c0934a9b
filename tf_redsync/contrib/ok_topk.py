"""Sparse all-reduce with reused thresholds."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks, ops
from tf_redsync.config import register
from tf_redsync.contrib.common import balanced_regions, recursive_doubling
from tf_redsync.exchange import feedback
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout
from tf_redsync.exchange.method import Exchange, State
from tf_redsync.exchange.requests import AllGather, AllToAll
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.sparsifier import Sparsifier, capacity, element_count, flat, split
from tf_redsync.ops import MessageLayout, wire
from tf_redsync.ops.message_layout import Parts
from tf_redsync.ops.wire import as_row, leading, only_row

SLACK = 1.25  # room for elements, over the mean
DRIFT = 1.012  # of a threshold in a step in which too many or too few elements reach it
FEWEST = 2 / 3


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class OkTopk(Sparsifier):
    """Ok-Topk: a sparse all-reduce of less than 6 k words, by thresholds that are reused.

    Shigang Li, Torsten Hoefler (2022), "Near-Optimal Sparse Allreduce for Distributed Deep
    Learning", PPoPP, arXiv 2201.07598.

    The gradients of a bucket are a vector of n elements, cut into K regions, and worker r adds up
    region r. With gradient g, residual v and density k / n, on every worker:

        v <- v + g
        every `threshold_interval` steps:  t = the k-th largest |v|
        S = the elements with |v| >= t
        those of S in region r go to worker r, for every r                one all-to-all
        on worker r:  x = the sums of what arrived
        every `threshold_interval` steps:  T = the k-th largest |x| of all workers
                      the x with |x| >= T go to all workers               one all-gather
        total = the K regions that were gathered, about k elements
        v[j] <- 0 where j is in S, was sent, and total[j] is not 0

    Thresholds change slowly, so an exact top-k is needed rarely; in between, one pass over the
    vector compares. The regions hold equal shares of S: every `partition_interval` steps each
    worker proposes boundaries that share out its own S equally, and the averages of the proposals
    are the new ones.

    Messages have a fixed length: a row, to one worker or to all, has room for c = 1.25 k / K
    elements. A worker sends 2 c (K - 1) words in each of the collectives, 5 k (K - 1) / K in all
    and 6 (K - 1) of heads, whatever the data. The paper's bound is 6 k (K - 1) / K. Of what does
    not fit, the smallest elements wait in the residual, as does everything that is sent and does
    not survive.

    Differences from the paper

    * T is found without an exchange of its own. When thresholds are evaluated, workers gather the c
      largest of their sums whatever T was, and T and the total are the k largest of all of them.
    * No sums are moved between workers to balance the all-gather. Regions balance it, and rows with
      25 % more room than the mean take the rest; the paper moves data if a worker has four times
      the mean.
    * Proposals for boundaries travel in the rows, one number each, and their averages in the
      gathered messages. New boundaries are used from the next step on; the first are those of equal
      regions.
    * Between evaluations a threshold grows by 1.2 % in a step in which 1.25 k elements or more
      reach it, and shrinks by as much if fewer than 2 k / 3 do, as in the authors' program.
    * No dense first steps (there: 512). Small tensors, biases and norms are all-reduced densely.

    Args:
        density: Fraction k / n of a bucket's elements that the total is to have, in (0, 1].
        threshold_interval: Steps from one evaluation of the thresholds to the next.
        partition_interval: Steps from one choice of the regions to the next.
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: for a hyper-parameter out of its range.

    Example:
        >>> OkTopk(density=0.02).threshold_interval
        32
    """

    threshold_interval: int = 32
    partition_interval: int = 64

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer("threshold_interval", self.threshold_interval, low=1)
        checks.integer("partition_interval", self.partition_interval, low=1)

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Li, Hoefler 2022",
            requests="all-to-all, then all-gather, of indices and values",
            bits="80 density (1 + 1 / K)",
            state_kinds={
                "residual": "sum",
                "own_threshold": "mean",
                "threshold": "shared",
                "regions": "shared",
            },
            rounds_values=False,
            # Each element comes from one worker, which has looked at its sums
            totals_may_overflow=False,
            sends_selected=False,
        )

    @override
    def init(self, layout: BucketLayout) -> State:
        """Two thresholds, and where the regions lie, in a form for any K."""
        return {
            **super().init(layout),
            "own_threshold": [tf.zeros([])],
            "threshold": [tf.zeros([])],
            "regions": [balanced_regions.equal(sum(s.size for s in layout.specs))],
        }

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        vector = flat(state["residual"]) + flat(feedback.scaled(grads, ctx.scale))
        size, workers = vector.shape[0], ctx.layout.workers
        if not (k := element_count(self.density, size)):
            return grads, state
        row = MessageLayout.of([capacity(SLACK * k / workers, size)])
        anew = tf.equal(ctx.step % self.threshold_interval, 0)
        points, threshold = state["regions"][0], state["threshold"][0]
        found, own_threshold = _selected(vector, state["own_threshold"][0], k, anew)
        sent = _shared_out(found, balanced_regions.edges(points, workers), size, row)
        rows, starts = balanced_regions.without_starts((yield AllToAll(sent.rows)))

        sums = recursive_doubling.merged(rows, row, [size], row)
        sums = _survivors(sums, row, tf.where(anew, 0.0, threshold))
        start = tf.reduce_sum(starts, keepdims=True) // workers  # the mean of the proposals
        message = only_row(balanced_regions.with_starts(as_row(sums), start))
        messages, starts = balanced_regions.without_starts((yield AllGather(message)))

        messages, threshold = _evaluated(messages, row, k, threshold, anew)
        (total,) = ops.decode(messages, row, [vector])
        renew = tf.equal(ctx.step % self.partition_interval, 0)
        residual = sent.left(found.residuals[0], total)
        return split(total, ctx.layout.specs), {
            "residual": split(residual, ctx.layout.specs),
            "own_threshold": [own_threshold],
            "threshold": [threshold],
            "regions": [tf.where(renew, balanced_regions.through(starts, size), points)],
        }


class _Sent(NamedTuple):
    """What a worker selected and sent: all of it, as positions and values, and the rows."""

    rows: tf.Tensor  # int32 [K, words]
    positions: tf.Tensor  # int64 [capacity], the vector's size in unused slots
    values: tf.Tensor  # float32 [capacity], 0 in unused slots
    fits: tf.Tensor  # bool [capacity], whether it is in a row

    def left(self, residual: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
        """Put back into the residual what is not in the total."""
        at = tf.minimum(self.positions, residual.shape[0] - 1)
        delivered = self.fits & tf.not_equal(tf.gather(total, at), 0.0)
        kept = tf.where(delivered, 0.0, self.values)
        return tf.tensor_scatter_nd_add(residual, at[:, tf.newaxis], kept)


def _selected(
    vector: tf.Tensor, threshold: tf.Tensor, k: int, anew: tf.Tensor
) -> tuple[ops.Selection, tf.Tensor]:
    """Select what reaches the threshold, and return the threshold of the next step too."""
    zeros = tf.zeros_like(vector)

    def largest() -> tf.Tensor:
        found = ops.accumulate_and_select([zeros], [vector], [], [k])
        (values,) = found.layout.split(found.message).values
        return tf.reduce_min(tf.abs(values))

    threshold = tf.cond(anew, largest, lambda: threshold)
    most = capacity(SLACK * k, vector.shape[0])
    found = ops.accumulate_and_select(
        [zeros], [vector], [], [most], threshold[tf.newaxis], selectors="fixed"
    )
    moved = _moved(threshold, found.layout.split(found.message).counts[0], k)
    return found, tf.where(anew, threshold, moved)


def _moved(threshold: tf.Tensor, count: tf.Tensor, k: int) -> tf.Tensor:
    """Move a threshold that too many elements reach up, and one that too few reach down."""
    raised = tf.where(count >= math.ceil(SLACK * k), threshold * DRIFT, threshold)
    return tf.where(count < math.floor(FEWEST * k), threshold / DRIFT, raised)


def _shared_out(selection: ops.Selection, ends: tf.Tensor, size: int, row: MessageLayout) -> _Sent:
    """Make rows of what is selected: flag, proposal, count, indices, values."""
    workers, parts = ends.shape[0] - 1, selection.layout.split(selection.message)
    (count,), (indices,), (values,) = tf.unstack(parts.counts), parts.indices, parts.values
    positions = recursive_doubling.positions(indices, count, size)
    shares = balanced_regions.shared_out(positions, indices, values, ends, row.capacities[0])
    flags = tf.repeat(parts.flags[tf.newaxis], workers, axis=0)
    rows = row.join(Parts(flags, shares.counts, [shares.indices], [shares.values]))
    wanted = balanced_regions.proposals(positions, count, workers, size)
    return _Sent(balanced_regions.with_starts(rows, wanted), positions, values, shares.fits)


def _survivors(message: tf.Tensor, layout: MessageLayout, limit: tf.Tensor) -> tf.Tensor:
    """Cut a message down to the elements that reach a limit."""
    parts, (slots,) = layout.split(message), layout.capacities
    (indices,), (values,) = parts.indices, parts.values
    chosen = leading(parts.counts[0], slots) & (tf.abs(values) >= limit)
    number = tf.cast(chosen, tf.float64)
    target = tf.where(chosen, tf.cast(tf.cumsum(number, exclusive=True), tf.int64), slots)
    indices = balanced_regions.placed(target, indices, slots)
    words = balanced_regions.placed(target, wire.to_words(values), slots)
    count = tf.cast(tf.reduce_sum(number, keepdims=True), tf.int32)
    return layout.join(Parts(parts.flags, count, [indices], [wire.from_words(words)]))


def _evaluated(
    messages: tf.Tensor, layout: MessageLayout, k: int, threshold: tf.Tensor, anew: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return what the total is of, and the threshold of the next step.

    Args:
        messages: int32 `[K, words]`, of all workers.
        layout: Of each.
        k: Elements of the total, if it is evaluated.
        threshold: The last one.
        anew: Whether to evaluate it. Else all that is in the messages survives.
    """
    parts = layout.split(messages)
    values = parts.values[0]
    magnitudes = tf.reshape(tf.abs(values), [-1])
    most = min(k, magnitudes.shape[0])
    limit = tf.cond(anew, lambda: tf.math.top_k(magnitudes, most).values[-1], lambda: 0.0)
    values = tf.where(tf.abs(values) >= limit, values, 0.0)
    messages = layout.join(Parts(parts.flags, parts.counts, parts.indices, [values]))
    return messages, tf.where(anew, limit, _moved(threshold, tf.reduce_sum(parts.counts), k))
