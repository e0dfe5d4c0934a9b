"""Ok-Topk: sparse all-reduce with reused thresholds and balanced regions."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks, ops
from tf_redsync.config import register
from tf_redsync.contrib.common import recursive_doubling
from tf_redsync.exchange import feedback
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout
from tf_redsync.exchange.method import Exchange, State
from tf_redsync.exchange.requests import AllGather, AllToAll
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.sparsifier import Sparsifier, capacity, element_count, flat, split
from tf_redsync.ops import MessageLayout, wire
from tf_redsync.ops.message_layout import Parts, signed, unsigned
from tf_redsync.ops.wire import as_row, cut, joined, leading, map_words, only_row

SLACK = 1.25  # capacity for elements, relative to their mean number
DRIFT = 1.012  # factor of a threshold after a step with too many or too few elements
FEWEST = 2 / 3  # fraction of k elements below which a threshold shrinks
PIECES = 64  # number of pieces in the state `regions`, which is independent of the workers' number


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class OkTopk(Sparsifier):
    """Ok-Topk: a sparse all-reduce of less than 6 k words, with reused thresholds.

    Shigang Li, Torsten Hoefler (2022), "Near-Optimal Sparse Allreduce for Distributed Deep
    Learning", PPoPP, arXiv 2201.07598, algorithm 1.

    The gradients of a bucket are a vector of n elements, cut into K regions, and worker r reduces
    region r. With gradient g, residual v and density k / n, on every worker:

        v <- v + g
        every `threshold_interval` steps:  t = the k-th largest |v|
        S = the elements with |v| >= t
        S in region r goes to worker r, for every r                       one all-to-all
        on worker r:  x = the sums of the received elements
        every `threshold_interval` steps:  T = the k-th largest |x| of all workers
                      x where |x| >= T goes to all workers                one all-gather
        total = the K gathered regions, about k elements
        v[j] <- 0 where j is in S, was sent, and total[j] is not 0

    Thresholds change slowly, so an exact top-k is rarely needed; the other steps compare in one
    pass over the vector. The regions hold equal shares of S. Every `partition_interval` steps each
    worker proposes boundaries that divide its own S equally. The new boundaries are the averages of
    the proposals.

    Messages have a fixed length: a row, to one worker or to all, has a capacity of c = 1.25 k / K
    elements. A worker sends 2 c (K - 1) words in each of the collectives. These are
    5 k (K - 1) / K words, plus 6 (K - 1) of headers, whatever the data. The bound in the paper is
    6 k (K - 1) / K.
    The smallest elements that exceed the capacity stay in the residual, as do the elements that are
    sent but do not reach T.

    Differences from the paper

    * T needs no exchange of its own. When thresholds are evaluated, workers gather the c largest of
      their sums regardless of T. The total has the k largest of all gathered sums, and T is the
      smallest of these.
    * No sums move between workers to balance the all-gather: the regions balance it, and rows have
      25 % more capacity than the mean. The paper moves data if a worker has four times the mean.
    * The rows of the all-to-all carry the proposed boundaries, one number each, and the gathered
      messages carry their averages. New boundaries are used from the next step on; at first all
      regions have equal lengths.
    * Between evaluations a threshold grows by 1.2 % after a step in which 1.25 k elements or more
      reach it. It shrinks by the same factor if fewer than 2 k / 3 do. Both are from the authors'
      code.
    * There are no dense first steps (512 in the authors' code). Biases, norms and small tensors are
      all-reduced densely.

    Args:
        density: Target fraction k / n of the elements of a bucket in the total, in (0, 1].
        threshold_interval: Steps between two evaluations of the thresholds.
        partition_interval: Steps between two updates of the regions.
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: If an argument is out of range; the message names it.

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
            # Each element comes from one worker, which has checked its sums for overflow
            totals_may_overflow=False,
            sends_selected=False,
        )

    @override
    def init(self, layout: BucketLayout) -> State:
        """Return residuals, two thresholds, and regions of equal lengths in a form for any K."""
        return {
            **super().init(layout),
            "own_threshold": [tf.zeros([])],
            "threshold": [tf.zeros([])],
            "regions": [equal_regions(sum(s.size for s in layout.specs))],
        }

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        vector = flat(state["residual"]) + flat(feedback.scaled(grads, ctx.scale))
        size, workers = vector.shape[0], ctx.layout.workers
        if not (k := element_count(self.density, size)):
            return grads, state
        row = MessageLayout.of([capacity(SLACK * k / workers, size)])
        evaluate = tf.equal(ctx.step % self.threshold_interval, 0)
        points, threshold = state["regions"][0], state["threshold"][0]
        selection, own_threshold = _selected(vector, state["own_threshold"][0], k, evaluate)
        sent = _sent_rows(selection, region_edges(points, workers), size, row)
        rows, starts = without_starts((yield AllToAll(sent.rows)))

        sums = recursive_doubling.merged(rows, row, [size], row)
        sums = _survivors(sums, row, tf.where(evaluate, 0.0, threshold))
        start = tf.reduce_sum(starts, keepdims=True) // workers  # mean of the proposals
        message = only_row(with_starts(as_row(sums), start))
        messages, starts = without_starts((yield AllGather(message)))

        messages, threshold = _evaluated(messages, row, k, threshold, evaluate)
        (total,) = ops.decode(messages, row, [vector])
        renew = tf.equal(ctx.step % self.partition_interval, 0)
        residual = sent.undelivered(selection.residuals[0], total)
        return split(total, ctx.layout.specs), {
            "residual": split(residual, ctx.layout.specs),
            "own_threshold": [own_threshold],
            "threshold": [threshold],
            "regions": [tf.where(renew, resampled_edges(starts, size), points)],
        }


class _Sent(NamedTuple):
    """Selected elements of a worker, as positions and values, and the rows that it sends."""

    rows: tf.Tensor  # int32 [K, words]
    positions: tf.Tensor  # int64 [capacity], the size of the vector in unused slots
    values: tf.Tensor  # float32 [capacity], 0 in unused slots
    fits: tf.Tensor  # bool [capacity], whether the element is in a row

    def undelivered(self, residual: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
        """Return the residual plus the selected elements that are not in the total."""
        at = tf.minimum(self.positions, residual.shape[0] - 1)
        delivered = self.fits & tf.not_equal(tf.gather(total, at), 0.0)
        returned = tf.where(delivered, 0.0, self.values)
        return tf.tensor_scatter_nd_add(residual, at[:, tf.newaxis], returned)


def _selected(
    vector: tf.Tensor, threshold: tf.Tensor, k: int, evaluate: tf.Tensor
) -> tuple[ops.Selection, tf.Tensor]:
    """Select the elements that reach the threshold; also return the next threshold."""
    zeros = tf.zeros_like(vector)

    def largest() -> tf.Tensor:
        selection = ops.accumulate_and_select([zeros], [vector], [], [k])
        (values,) = selection.layout.split(selection.message).values
        return tf.reduce_min(tf.abs(values))

    threshold = tf.cond(evaluate, largest, lambda: threshold)
    most = capacity(SLACK * k, vector.shape[0])
    selection = ops.accumulate_and_select(
        [zeros], [vector], [], [most], threshold[tf.newaxis], selectors="fixed"
    )
    adapted = _adapted(threshold, selection.layout.split(selection.message).counts[0], k)
    return selection, tf.where(evaluate, threshold, adapted)


def _adapted(threshold: tf.Tensor, count: tf.Tensor, k: int) -> tf.Tensor:
    """Raise a threshold that too many elements reach, and lower one that too few reach."""
    raised = tf.where(count >= math.ceil(SLACK * k), threshold * DRIFT, threshold)
    return tf.where(count < math.floor(FEWEST * k), threshold / DRIFT, raised)


def _sent_rows(selection: ops.Selection, ends: tf.Tensor, size: int, row: MessageLayout) -> _Sent:
    """Arrange the selection in rows: flag, proposed edge, count, indices, values."""
    workers, parts = ends.shape[0] - 1, selection.layout.split(selection.message)
    (count,), (indices,), (values,) = tf.unstack(parts.counts), parts.indices, parts.values
    positions = recursive_doubling.positions(indices, count, size)
    shares = rows_by_region(positions, indices, values, ends, row.capacities[0])
    flags = tf.repeat(parts.flags[tf.newaxis], workers, axis=0)
    rows = row.join(Parts(flags, shares.counts, [shares.indices], [shares.values]))
    proposals = proposed_edges(positions, count, workers, size)
    return _Sent(with_starts(rows, proposals), positions, values, shares.fits)


def _survivors(message: tf.Tensor, layout: MessageLayout, limit: tf.Tensor) -> tf.Tensor:
    """Return a message with only the elements that reach a limit."""
    parts, (slots,) = layout.split(message), layout.capacities
    (indices,), (values,) = parts.indices, parts.values
    chosen = leading(parts.counts[0], slots) & (tf.abs(values) >= limit)
    number = tf.cast(chosen, tf.float64)
    target = tf.where(chosen, tf.cast(tf.cumsum(number, exclusive=True), tf.int64), slots)
    indices = placed(target, indices, slots)
    words = placed(target, wire.to_words(values), slots)
    count = tf.cast(tf.reduce_sum(number, keepdims=True), tf.int32)
    return layout.join(Parts(parts.flags, count, [indices], [wire.from_words(words)]))


def _evaluated(
    messages: tf.Tensor, layout: MessageLayout, k: int, threshold: tf.Tensor, evaluate: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return messages of the elements in the total, and the next threshold T.

    Args:
        messages: int32 `[K, words]`, of all workers.
        layout: Layout of each message.
        k: Number of elements in the total if T is evaluated.
        threshold: The last T.
        evaluate: Whether to evaluate T. Otherwise all gathered elements are in the total.
    """
    parts = layout.split(messages)
    values = parts.values[0]
    magnitudes = tf.reshape(tf.abs(values), [-1])
    most = min(k, magnitudes.shape[0])
    limit = tf.cond(evaluate, lambda: tf.math.top_k(magnitudes, most).values[-1], lambda: 0.0)
    values = tf.where(tf.abs(values) >= limit, values, 0.0)
    messages = layout.join(Parts(parts.flags, parts.counts, parts.indices, [values]))
    return messages, tf.where(evaluate, limit, _adapted(threshold, tf.reduce_sum(parts.counts), k))


def equal_regions(size: int) -> tf.Tensor:
    """Return the boundaries of 64 pieces of equal length, float64 `[65]`."""
    return tf.constant(np.linspace(0, size, PIECES + 1), tf.float64)


def resampled_edges(edges: tf.Tensor, size: int) -> tf.Tensor:
    """Return boundaries of 64 pieces from the first positions of regions, int64 `[K]`."""
    ends = tf.concat([edges, tf.constant([size], tf.int64)], axis=0)
    return _resampled(tf.cast(ends, tf.float64), PIECES)


def region_edges(points: tf.Tensor, workers: int) -> tf.Tensor:
    """Return the boundaries of the regions of K workers, interpolated from those of 64 pieces.

    Args:
        points: Boundaries from `equal_regions` or `resampled_edges`.
        workers: K.

    Returns:
        int64 `[K + 1]`, ascending: the start of every region and the end of the last one.
    """
    return tf.sort(tf.cast(tf.floor(_resampled(points, workers)), tf.int64))


def _resampled(points: tf.Tensor, pieces: int) -> tf.Tensor:
    """Resample the line through equidistant points at `pieces + 1` equidistant places."""
    last = points.shape[0] - 1
    at = np.arange(pieces + 1) * last / pieces
    low = np.minimum(at.astype(np.int64), last - 1)
    share = tf.constant(at - low, tf.float64)
    return (1.0 - share) * tf.gather(points, low) + share * tf.gather(points, low + 1)


def proposed_edges(positions: tf.Tensor, count: tf.Tensor, workers: int, size: int) -> tf.Tensor:
    """Return the starts of regions that divide the positions equally, int64 `[K]`.

    Args:
        positions: int64 `[capacity]`, ascending in the first `count` slots.
        count: int32 scalar. If it is 0, the regions have equal lengths.
        workers: K.
        size: Number of elements of the vector.
    """
    number = tf.range(workers, dtype=tf.int64)
    at = tf.gather(positions, number * tf.cast(count, tf.int64) // workers)
    starts = tf.where(count > 0, at, number * size // workers)
    return tf.where(number > 0, starts, tf.zeros_like(starts))


class RowsByRegion(NamedTuple):
    """Elements in rows, one row for each worker.

    Attributes:
        counts: int32 `[K, 1]`, used slots of each row.
        indices: int32 `[K, slots]`, the positions as unsigned 32-bit integers.
        values: float32 `[K, slots]`.
        fits: bool `[capacity]`, whether an element is in a row.
    """

    counts: tf.Tensor
    indices: tf.Tensor
    values: tf.Tensor
    fits: tf.Tensor


def rows_by_region(
    positions: tf.Tensor, indices: tf.Tensor, values: tf.Tensor, ends: tf.Tensor, slots: int
) -> RowsByRegion:
    """Put every element into the row of its region; the largest ones if a row has too few slots.

    Args:
        positions: int64 `[capacity]`, ascending; the size of the vector in unused slots.
        indices: int32 `[capacity]`, the positions as unsigned 32-bit integers.
        values: float32 `[capacity]`.
        ends: Boundaries from `region_edges`.
        slots: Capacity of a row.
    """
    workers, capacity = ends.shape[0] - 1, positions.shape[0]
    # int64 and float64, because TensorFlow places int32 computations on the host.
    # Unused slots are in region K.
    region = tf.searchsorted(ends[1:], positions, side="right", out_type=tf.int64)
    first = tf.searchsorted(region, tf.constant(np.arange(workers + 1)), out_type=tf.int64)
    place = tf.constant(np.arange(capacity)) - tf.gather(first, region)
    # Sort by region and then by magnitude. Regions ascend before and after, so `place` stays
    # valid.
    order = tf.cast(tf.argsort(-tf.abs(values), stable=True), tf.int64)
    by_region = tf.argsort(tf.cast(tf.gather(region, order), tf.float32), stable=True)
    order = tf.gather(order, by_region)
    fits = tf.cast((place < slots) & (region < workers), tf.float64)
    fits = tf.scatter_nd(order[:, tf.newaxis], fits, tf.constant([capacity], tf.int64))
    before = tf.cast(tf.cumsum(fits, exclusive=True), tf.int64)
    before -= tf.gather(before, tf.minimum(tf.gather(first, region), capacity - 1))
    target = tf.where(fits > 0.0, region * slots + before, workers * slots)
    counts = tf.math.unsorted_segment_sum(fits, region, workers + 1)[:workers, tf.newaxis]
    counts = tf.cast(counts, tf.int32)
    indices, words = (
        map_words(
            lambda row: tf.reshape(row, [workers, slots]),
            placed(target, w, workers * slots),
        )
        for w in (indices, wire.to_words(values))
    )
    return RowsByRegion(counts, indices, wire.from_words(words), fits > 0.0)


def placed(targets: tf.Tensor, words: tf.Tensor, capacity: int) -> tf.Tensor:
    """Scatter int32 words to targets, int64; omit words with a target of at least `capacity`."""
    shape = tf.constant([capacity + 1], tf.int64)
    return signed(tf.scatter_nd(targets[:, tf.newaxis], unsigned(words), shape)[:capacity])


def with_starts(rows: tf.Tensor, starts: tf.Tensor) -> tf.Tensor:
    """Insert a start, int64 `[P]`, after the flag of each row; 0 if the flag is 0."""
    flags, words = map_words(lambda r: (r[:, : wire.HEADER_WORDS], r[:, wire.HEADER_WORDS :]), rows)
    starts = signed(tf.cast(flags, tf.int64) * starts[:, tf.newaxis])
    return joined(flags, starts, words, axis=1)


def without_starts(rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Undo `with_starts`: return the rows, and the starts as int64 `[P]`."""
    flags, starts, words = cut(rows, [wire.HEADER_WORDS, 1, -1])
    return joined(flags, words, axis=1), unsigned(starts)[:, 0]
