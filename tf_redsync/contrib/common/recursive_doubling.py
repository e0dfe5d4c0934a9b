"""Recursive doubling: what methods share that add up in rounds between pairs of workers.

With K = 2^m workers there are m rounds; in round r = 0, 1, ... the partners' ranks differ by 2^r.
Both get the same two messages and do the same with them, the lower rank's first, so after round r
all of 2^(r+1) workers hold the same bits.

For other K let H be the largest power of two below. In a round of its own before the others,
worker H + i hands its message to worker i, and takes part with empty messages from then on; in one
after the others it is given the result. So the rounds have the distances

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
    moved,
)


class Rounds(NamedTuple):
    """The distances of the partners, round by round.

    Attributes:
        first: Of the round in which workers beyond a power of two hand over, or `None`.
        doubling: Of the rounds of recursive doubling. One worker has one round, on its own.
        last: Of the round in which those get the result, or `None`.
    """

    first: int | None
    doubling: tuple[int, ...]
    last: int | None


def rounds(workers: int) -> Rounds:
    """Return the rounds for so many workers.

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
    """Return the positions in a message as numbers, int64, ascending.

    Args:
        indices: int32 `[slots]`, their bits.
        count: int32 scalar, how many slots are used. The others' positions are `size`.
        size: Elements of the tensor.
    """
    used = unsigned(indices)
    return tf.where(leading(count, indices.shape[0]), used, tf.constant(size, tf.int64))


def merged(
    rows: tf.Tensor, layout: MessageLayout, sizes: Sequence[int], kept: MessageLayout
) -> tf.Tensor:
    """Add up messages and keep the largest sums, as one message.

    Args:
        rows: int32 `[P, words]`; those with flag 0 are all zero.
        layout: Of a row, without means.
        sizes: Elements of each tensor.
        kept: Of the result: as many sums are kept as it has room for.

    Returns:
        int32 `[words]`, all zero unless everything, and the sums too, is finite.
    """
    parts = layout.split(rows)
    sums = sparse_merge(parts.indices, parts.values, parts.counts, sizes=sizes, k=kept.capacities)
    finite = all_ones(parts.flags) & wire.all_finite(sums.values)
    return kept.message(finite, sums.counts, sums.indices, sums.values)


def handed_over(message: tf.Tensor, rank: tf.Tensor, first: int) -> tf.Tensor:
    """Return what a worker goes on with after the first round, in which others handed over.

    Args:
        message: int32 `[words]`, the sum of both partners.
        rank: The worker's.
        first: The distance of that round. Workers from this rank on go on with a message about
            nothing, with the flag of `message` and as long.
    """

    def taken(words: tf.Tensor) -> tf.Tensor:
        header = words[: wire.HEADER_WORDS]
        nothing = tf.concat([header, tf.zeros_like(words[wire.HEADER_WORDS :])], axis=0)
        return tf.where(rank < first, words, nothing)

    return moved(taken, message)


def stopping(message: tf.Tensor, totals: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return `totals`, all NaN if the flag of `message` is 0.

    For the last sums: no later message carries their flag, but totals are looked at.
    """
    finite = wire.are_finite(as_row(message))
    return [tf.where(finite, t, tf.constant(float("nan"))) for t in totals]
