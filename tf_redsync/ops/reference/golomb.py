"""Pure-TensorFlow reference of `ops/golomb.py`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tf_redsync.ops.message_layout import golomb_sections
from tf_redsync.ops.reference import bits
from tf_redsync.ops.reference.common import (
    after,
    assert_none,
    assert_shape,
    check_ascending,
    check_positions,
    from_words,
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
    """Return [count, low bits, bitmap] of the gaps - 1, int64 [slots]."""
    slots = tf.size(gaps)
    gaps = tf.where(tf.range(slots) < count, gaps, 0)
    places = np.arange(rice, dtype=np.int64)
    low = tf.reshape(tf.bitwise.right_shift(gaps[:, None], places) & np.int64(1), [-1])
    low = tf.pad(low, [[0, -tf.size(low) % 32]])
    zeros = tf.bitwise.right_shift(gaps, np.int64(rice))
    ones = tf.cast(tf.cumsum(zeros), tf.int32) + tf.range(slots)
    leaps = tf.bitwise.right_shift(size - tf.cast(slots, tf.int64), np.int64(rice))
    words = -(-(slots + tf.cast(leaps, tf.int32)) // 32)
    return tf.concat([[count], to_words(low), bits.to_bitmap(ones, count, words)], 0)


def golomb_decode(
    messages: tf.Tensor, *, sizes: Sequence[int], slots: Sequence[int], rice: Sequence[int]
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """See `tf_redsync.ops.golomb_decode`; all arguments are given and already checked."""
    layout = list(zip(sizes, slots, rice, strict=True))
    lengths = [[1, *golomb_sections(*of_tensor)] for of_tensor in layout]
    checks = [assert_shape("messages", messages, [-1, sum(map(sum, lengths))])]
    parts = tf.split(after(checks, messages), [sum(x) for x in lengths], 1)
    indices = [
        _decode_part(tf.split(part, lengths[i], 1), i, *layout[i]) for i, part in enumerate(parts)
    ]
    return indices, tf.concat([part[:, :1] for part in parts], 1)


def _decode_part(part, i: int, size: int, slots: int, rice: int):
    """Return the positions, int32 [P, slots], of one tensor's count, low bits and bitmap."""
    count, low, bitmap = part
    wrong = (count < 0) | (count > slots)
    count = after([assert_none("messages", "count", wrong, count, i)], count)
    ones, ones_count = bits.set_bits(bitmap, slots)
    check = assert_none(
        "messages", "number of ones", tf.not_equal(ones_count, count), ones_count, i
    )
    order = np.arange(slots, dtype=np.int64)
    leaps = tf.bitwise.left_shift(tf.cast(after([check], ones), tf.int64) - order, np.int64(rice))
    lows = tf.cumsum(tf.cast(bits.unpacked(low, rice, slots), tf.int64), axis=1)
    positions, valid = lows + leaps + order, order < tf.cast(count, tf.int64)
    bad = valid & (positions >= size)
    positions = after([assert_none("messages", "index", bad, positions, i)], positions)
    return to_unsigned(tf.where(valid, positions, 0))
