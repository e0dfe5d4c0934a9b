"""Pure-TensorFlow reference of `ops/golomb.py`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tf_redsync.ops.reference.common import (
    after,
    assert_none,
    assert_shape,
    check_ascending,
    check_positions,
    from_words,
    to_bits,
    to_unsigned,
    to_words,
)


def golomb_encode(
    indices: Sequence[tf.Tensor],
    counts: tf.Tensor,
    *,
    sizes: Sequence[int],
    rice: Sequence[int],
) -> tf.Tensor:
    """See `tf_redsync.ops.golomb_encode`; all arguments are given and already checked."""
    counts = after([assert_shape("counts", counts, [len(indices)])], counts)
    parts = []
    for i, (words, size) in enumerate(zip(indices, sizes, strict=True)):
        positions = from_words(words, size)
        checks = check_positions(positions, counts[i], size, i)
        checks.append(check_ascending(positions, counts[i], i))
        positions = after(checks, positions)
        gaps = positions - tf.concat([tf.constant([-1], tf.int64), positions[:-1]], 0) - 1
        parts.append(_golomb_part(gaps, counts[i], size, rice[i]))
    return tf.concat(parts, 0)


def _golomb_part(gaps, count, size: int, rice: int):
    """Return [count, bits, words] of the gaps - 1, int64 [slots]."""
    slots = tf.size(gaps, tf.int64)
    words = -(-(slots * (rice + 1) + tf.bitwise.right_shift(size - slots, np.int64(rice))) // 32)
    valid = tf.range(slots) < tf.cast(count, tf.int64)
    ones = tf.bitwise.right_shift(gaps, np.int64(rice))
    lengths = tf.where(valid, ones + 1 + rice, 0)
    starts = tf.cumsum(lengths, exclusive=True)

    # Invalid entries are scattered to one place beyond the last bit.
    def scatter(at, value):
        at = tf.where(valid[:, None], at, 32 * words)
        return tf.scatter_nd(tf.reshape(at, [-1, 1]), tf.reshape(value, [-1]), [32 * words + 1])

    first, stop, step = starts[:, None], (starts + ones)[:, None], tf.ones_like(gaps)[:, None]
    runs = tf.cumsum(scatter(first, step) - scatter(stop, step))  # 1 from first to stop
    places = np.arange(rice, dtype=np.int64)
    low = tf.bitwise.right_shift(gaps[:, None], places) & np.int64(1)
    bits = (runs + scatter(stop + 1 + places, low))[:-1]
    head = tf.stack([count, tf.cast(tf.reduce_sum(lengths), tf.int32)])
    return tf.concat([head, to_words(bits)], 0)


def golomb_decode(
    messages: tf.Tensor, *, sizes: Sequence[int], slots: Sequence[int], rice: Sequence[int]
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """See `tf_redsync.ops.golomb_decode`; all arguments are given and already checked."""
    layout = list(zip(sizes, slots, rice, strict=True))
    lengths = [2 + -(-(k * (b + 1) + ((size - k) >> b)) // 32) for size, k, b in layout]
    checks = [assert_shape("messages", messages, [-1, sum(lengths)])]
    parts = tf.split(after(checks, messages), lengths, 1)
    indices = [_decode_part(p, i, *layout[i]) for i, p in enumerate(parts)]
    return indices, tf.concat([part[:, :1] for part in parts], 1)


def _decode_part(part, i: int, size: int, slots: int, rice: int):
    """Return the positions, int32 [P, slots], of one tensor's part [P, 2 + words]."""
    count, end, bits = part[:, :1], part[:, 1:2], to_bits(part[:, 2:])
    length = bits.shape[1]
    checks = [
        assert_none("messages", "count", (count < 0) | (count > slots), count, i),
        assert_none("messages", "bits", (end < 0) | (end > length), end, i),
    ]
    count, end = after(checks, count), after(checks, end)
    next_zero, after_code = _code_ends(bits, end, rice)
    # The starts of codes: each round doubles their number and the distance of a leap.
    starts, leap = tf.zeros_like(count), after_code
    while starts.shape[1] < slots:
        starts = tf.concat([starts, tf.gather(leap, starts, batch_dims=1)], 1)
        leap = tf.gather(leap, leap, batch_dims=1)
    starts = starts[:, :slots]
    stops = tf.gather(after_code, starts, batch_dims=1)
    valid = tf.range(slots) < count
    last = tf.reduce_max(tf.where(valid, stops, 0), axis=1, keepdims=True) if slots else 0 * count
    short = valid & (stops > length)
    checks = [
        assert_none("messages", "bits (too few)", short, tf.broadcast_to(end, tf.shape(stops)), i)
    ]
    checks.append(assert_none("messages", "bits", last != end, end, i))
    zero = tf.minimum(tf.gather(next_zero, after(checks, starts), batch_dims=1), length)
    gap = tf.cast(zero - starts, tf.int64) * 2**rice + 1
    padded = tf.pad(bits, [[0, 0], [0, rice + 2]])
    for t in range(rice):
        gap += tf.cast(tf.gather(padded, zero + 1 + t, batch_dims=1), tf.int64) * 2**t
    positions = tf.cumsum(tf.where(valid, gap, 0), axis=1) - 1
    bad = valid & (positions >= size)
    positions = after([assert_none("messages", "index", bad, positions, i)], positions)
    return to_unsigned(tf.where(valid, positions, 0))


def _code_ends(bits, end, rice: int):
    """Return, for every bit [P, length + 2], the next zero before `end` and the end of its code.

    Both are beyond `length` if no zero follows.
    """
    ranks, length = tf.shape(bits)[0], bits.shape[1]
    place = tf.range(length + 2)
    zero = tf.pad(1 - bits, [[0, 0], [0, 2]]) * tf.cast(place < end, tf.int32)
    order = tf.cumsum(zero, axis=1, exclusive=True)  # number of the next zero
    where = tf.where(zero > 0)
    slot = tf.stack([where[:, 0], tf.cast(tf.gather_nd(order, where), tf.int64)], 1)
    beyond = length + 1
    zeros = tf.fill([ranks, length + 2], beyond)
    zeros = tf.tensor_scatter_nd_update(zeros, slot, tf.cast(where[:, 1], tf.int32))
    next_zero = tf.gather(zeros, order, batch_dims=1)
    stop = next_zero + 1 + rice
    return next_zero, tf.where(stop <= end, stop, beyond)
