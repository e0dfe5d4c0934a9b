"""Regions of a vector that hold equal shares of what is selected, one for each worker.

The regions are kept as points, 65 positions that cut the vector into 64 pieces of equal shares,
whatever the number of workers; the regions of K workers are interpolated from them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tf_redsync.ops import wire
from tf_redsync.ops.message_layout import signed, unsigned
from tf_redsync.ops.wire import cut, joined, moved

PIECES = 64


def equal(size: int) -> tf.Tensor:
    """Return the points of pieces of equal length, float64 `[65]`."""
    return tf.constant(np.linspace(0, size, PIECES + 1), tf.float64)


def through(edges: tf.Tensor, size: int) -> tf.Tensor:
    """Return the points that regions with these first positions, int64 `[K]`, lead to."""
    ends = tf.concat([edges, tf.constant([size], tf.int64)], axis=0)
    return _resampled(tf.cast(ends, tf.float64), PIECES)


def edges(points: tf.Tensor, workers: int) -> tf.Tensor:
    """Return where the regions of so many workers begin, and the last one ends.

    Args:
        points: From `equal` or `through`.
        workers: K.

    Returns:
        int64 `[K + 1]`, ascending.
    """
    return tf.sort(tf.cast(tf.floor(_resampled(points, workers)), tf.int64))


def _resampled(points: tf.Tensor, pieces: int) -> tf.Tensor:
    """A line through equidistant points, read at `pieces + 1` equidistant places."""
    last = points.shape[0] - 1
    at = np.arange(pieces + 1) * last / pieces
    low = np.minimum(at.astype(np.int64), last - 1)
    share = tf.constant(at - low, tf.float64)
    return (1.0 - share) * tf.gather(points, low) + share * tf.gather(points, low + 1)


def proposals(positions: tf.Tensor, count: tf.Tensor, workers: int, size: int) -> tf.Tensor:
    """Return where regions would begin that share out the positions equally, int64 `[K]`.

    Args:
        positions: int64 `[capacity]`, of which the first `count` ascend.
        count: int32 scalar. Without positions the regions are of equal length.
        workers: K.
        size: Elements of the vector.
    """
    number = tf.range(workers, dtype=tf.int64)
    at = tf.gather(positions, number * tf.cast(count, tf.int64) // workers)
    wanted = tf.where(count > 0, at, number * size // workers)
    return tf.where(number > 0, wanted, tf.zeros_like(wanted))


class Shares(NamedTuple):
    """Elements in rows, one for each worker.

    Attributes:
        counts: int32 `[K, 1]`.
        indices: int32 `[K, slots]`, the bits of their positions.
        values: float32 `[K, slots]`.
        fits: bool `[capacity]`, which elements are in a row.
    """

    counts: tf.Tensor
    indices: tf.Tensor
    values: tf.Tensor
    fits: tf.Tensor


def shared_out(
    positions: tf.Tensor, indices: tf.Tensor, values: tf.Tensor, ends: tf.Tensor, slots: int
) -> Shares:
    """Put elements into a row for the worker of their region; the largest, if not all fit.

    Args:
        positions: int64 `[capacity]`, ascending; of unused slots the vector's size.
        indices: int32 `[capacity]`, their bits.
        values: float32 `[capacity]`.
        ends: From `edges`.
        slots: Capacity of a row.
    """
    workers, capacity = ends.shape[0] - 1, positions.shape[0]
    # Numbers are int64 or float64, with which GPUs compute; with int32 they do on the host.
    region = tf.searchsorted(ends[1:], positions, side="right", out_type=tf.int64)  # unused: K
    first = tf.searchsorted(region, tf.constant(np.arange(workers + 1)), out_type=tf.int64)
    place = tf.constant(np.arange(capacity)) - tf.gather(first, region)
    # By region and then by magnitude. Regions ascend before and after, so places stay the same.
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
        moved(
            lambda row: tf.reshape(row, [workers, slots]),
            placed(target, w, workers * slots),
        )
        for w in (indices, wire.to_words(values))
    )
    return Shares(counts, indices, wire.from_words(words), fits > 0.0)


def placed(targets: tf.Tensor, words: tf.Tensor, capacity: int) -> tf.Tensor:
    """Return int32 words at their targets, int64, each below `capacity`; others are left out."""
    shape = tf.constant([capacity + 1], tf.int64)
    return signed(tf.scatter_nd(targets[:, tf.newaxis], unsigned(words), shape)[:capacity])


def with_starts(rows: tf.Tensor, starts: tf.Tensor) -> tf.Tensor:
    """Insert a first position, int64 `[P]`, after the flag of each row; 0 if the flag is 0."""
    flags, words = moved(lambda r: (r[:, : wire.HEADER_WORDS], r[:, wire.HEADER_WORDS :]), rows)
    starts = signed(tf.cast(flags, tf.int64) * starts[:, tf.newaxis])
    return joined(flags, starts, words, axis=1)


def without_starts(rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Undo `with_starts`."""
    flags, starts, words = cut(rows, [wire.HEADER_WORDS, 1, -1])
    return joined(flags, words, axis=1), unsigned(starts)[:, 0]
