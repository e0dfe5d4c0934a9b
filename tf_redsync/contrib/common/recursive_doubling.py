"""Recursive doubling: a reduction in log2(K) rounds between pairs of workers.

With K = 2^m workers there are m rounds. In round r = 0, 1, ... the ranks of two partners differ by
2^r. Both receive the same two messages and combine them in the order of their ranks, so after round
r all of 2^(r + 1) workers hold the same bits.

For other K, let H be the largest power of two below K. In an additional first round worker H + i
sends its message to worker i, and contributes empty messages from then on. In an additional last
round it receives the result. The distances between partners are

    [H,] 1, 2, 4, ..., H / 2 [, H]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_redsync.ops import wire
from tf_redsync.ops.merging import sparse_merge
from tf_redsync.ops.message_layout import MessageLayout, unsigned
from tf_redsync.ops.wire import (
    all_ones,
    as_row,
    leading,
    map_words,
)


class Rounds(NamedTuple):
    """Distances between partners, by round.

    Attributes:
        first: Distance in the first round, in which workers beyond a power of two send their
            message to a partner, or `None`.
        doubling: Distances in the rounds of recursive doubling. A single worker has one round, with
            itself.
        last: Distance in the last round, in which the workers of `first` receive the result, or
            `None`.
    """

    first: int | None
    doubling: tuple[int, ...]
    last: int | None


def rounds(workers: int) -> Rounds:
    """Return the rounds for a number of workers.

    Example:
        >>> rounds(8)
        Rounds(first=None, doubling=(1, 2, 4), last=None)
        >>> rounds(7)
        Rounds(first=4, doubling=(1, 2), last=4)
    """
    bits = workers.bit_length() - 1
    half = 2**bits if workers != 2**bits else None
    return Rounds(half, tuple(2**r for r in range(max(bits, 1))), half)


def positions(indices: tf.Tensor, count: tf.Tensor, size: int) -> tf.Tensor:
    """Return the positions of a message as int64, ascending.

    Args:
        indices: int32 `[slots]`, the positions as unsigned 32-bit integers.
        count: int32 scalar, number of used slots. Unused slots get the position `size`.
        size: Number of elements of the tensor.
    """
    used = unsigned(indices)
    return tf.where(leading(count, indices.shape[0]), used, tf.constant(size, tf.int64))


def merged(
    rows: tf.Tensor, layout: MessageLayout, sizes: Sequence[int], result_layout: MessageLayout
) -> tf.Tensor:
    """Sum messages and keep the largest sums, as one message.

    Args:
        rows: int32 `[P, words]`; a row with flag 0 is all zeros.
        layout: Layout of a row, without means.
        sizes: Number of elements of each tensor.
        result_layout: Layout of the result; its capacity is the number of sums to keep.

    Returns:
        int32 `[words]`, all zeros unless all messages and the sums are finite.
    """
    parts = layout.split(rows)
    sums = sparse_merge(
        parts.indices, parts.values, parts.counts, sizes=sizes, k=result_layout.capacities
    )
    finite = all_ones(parts.flags) & wire.all_finite(sums.values)
    return result_layout.message(finite, sums.counts, sums.indices, sums.values)


def after_first_round(message: tf.Tensor, rank: tf.Tensor, first: int) -> tf.Tensor:
    """Return the message with which a worker continues after the additional first round.

    Args:
        message: int32 `[words]`, the sum of both partners.
        rank: Rank of the worker.
        first: Distance of that round. Workers from this rank on continue with an empty message that
            has the flag and length of `message`.
    """

    def own_part(words: tf.Tensor) -> tf.Tensor:
        header = words[: wire.HEADER_WORDS]
        empty = tf.concat([header, tf.zeros_like(words[wire.HEADER_WORDS :])], axis=0)
        return tf.where(rank < first, words, empty)

    return map_words(own_part, message)


def nan_unless_finite(message: tf.Tensor, totals: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return `totals`, all NaN if the flag of `message` is 0.

    This marks the sums of the last round as non-finite: no later message carries their flag, but
    the driver checks totals.
    """
    finite = wire.flags_are_set(as_row(message))
    return [tf.where(finite, t, tf.constant(float("nan"))) for t in totals]
