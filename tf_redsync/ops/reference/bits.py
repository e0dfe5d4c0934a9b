"""Pure-TensorFlow reference of `ops/bits.py`."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tf_redsync.ops.message_layout import packed_words
from tf_redsync.ops.reference.common import (
    after,
    assert_none,
    assert_shape,
    check_ascending,
    check_positions,
    to_bits,
)


def packed(codes: tf.Tensor, bits: int) -> tf.Tensor:
    """See `tf_redsync.ops.bits.packed`; all arguments are given and already checked."""
    count, outer = codes.shape[-1], tf.shape(codes)[:-1]
    words = packed_words(count, bits)
    if words == 0:
        return tf.zeros(tf.concat([outer, [0]], 0), tf.int32)
    # 32 codes fill `bits` words exactly.
    flat = tf.pad(tf.reshape(codes, [-1, count]), [[0, 0], [0, -count % 32]])
    rows = tf.bitwise.bitwise_and(tf.bitcast(tf.reshape(flat, [-1, 32]), tf.uint32), _mask(bits))
    word, shift, crosses, rest = _places(bits)
    low = tf.bitwise.left_shift(rows, shift)
    high = tf.where(crosses, tf.bitwise.right_shift(rows, rest), tf.zeros_like(rows))
    pieces = tf.transpose(tf.bitcast(tf.concat([low, high], axis=1), tf.int32))
    # Codes do not overlap, so their sum is a bitwise or.
    sums = tf.math.unsorted_segment_sum(pieces, np.concatenate([word, word + 1]), bits + 1)
    all_words = tf.reshape(tf.transpose(sums[:bits]), [-1, -(-count // 32) * bits])[:, :words]
    result = tf.reshape(all_words, tf.concat([outer, [words]], 0))
    return tf.ensure_shape(result, [*codes.shape[:-1], words])


def unpacked(words: tf.Tensor, bits: int, count: int) -> tf.Tensor:
    """See `tf_redsync.ops.bits.unpacked`; all arguments are given and already checked."""
    length = packed_words(count, bits)
    words = after([assert_shape("words", words, [-1, length])], words)
    if length == 0:
        return tf.zeros([tf.shape(words)[0], count], tf.int32)
    groups = -(-count // 32)
    grouped = tf.pad(words, [[0, 0], [0, groups * bits - length]])
    grouped = tf.reshape(grouped, [-1, groups, bits])
    word, shift, crosses, rest = _places(bits)
    low = tf.bitcast(tf.gather(grouped, word, axis=2), tf.uint32)
    high = tf.bitcast(tf.gather(grouped, np.minimum(word + 1, bits - 1), axis=2), tf.uint32)
    high = tf.where(crosses, tf.bitwise.left_shift(high, rest), tf.zeros_like(high))
    codes = (tf.bitwise.right_shift(low, shift) | high) & _mask(bits)
    return tf.bitcast(tf.reshape(codes, [-1, 32 * groups])[:, :count], tf.int32)


def written(codes: tf.Tensor, lengths: tf.Tensor, words: int) -> tf.Tensor:
    """See `tf_redsync.ops.bits.written`; all arguments are given and already checked."""
    bad = (lengths < 0) | (lengths > 32)
    lengths = after([assert_none("lengths", "length", bad, lengths, None)], lengths)
    lengths = tf.cast(lengths, tf.int64)
    codes &= tf.bitwise.left_shift(tf.ones_like(codes), lengths) - 1
    starts = tf.cumsum(lengths, exclusive=True)
    low = tf.bitwise.left_shift(codes, starts % 32)  # below 2^63
    word = tf.minimum(starts // 32, words)
    pieces = tf.concat(
        [low & 0xFFFFFFFF, tf.bitwise.right_shift(low, tf.constant(32, tf.int64))], 0
    )
    at = tf.minimum(tf.concat([word, word + 1], 0), words)
    # A sum as a bitwise or, as above.
    sums = tf.scatter_nd(at[:, tf.newaxis], pieces, [words + 1])[:words]
    return tf.bitcast(tf.cast(sums, tf.uint32), tf.int32)


def bitmap(positions: tf.Tensor, count: tf.Tensor, words: int) -> tf.Tensor:
    """See `tf_redsync.ops.bits.bitmap`; all arguments are given and already checked."""
    far = tf.cast(positions, tf.int64)
    checks = check_positions(far, count, 32 * words, None, "positions")
    checks.append(check_ascending(far, count, None, "positions"))
    return to_bitmap(after(checks, positions), count, words)


def to_bitmap(positions: tf.Tensor, count: tf.Tensor | int, words: int) -> tf.Tensor:
    """Return the bitmap of valid positions; see `bitmap`."""
    word = tf.where(tf.range(tf.size(positions)) < count, positions // 32, words)
    bit = tf.bitwise.left_shift(tf.ones_like(positions), positions % 32)
    return tf.scatter_nd(word[:, tf.newaxis], bit, [words + 1])[:words]


def set_bits(words: tf.Tensor, slots: int) -> tuple[tf.Tensor, tf.Tensor]:
    """See `tf_redsync.ops.bits.set_bits`; all arguments are given and already checked."""
    rows, bits = tf.shape(words)[0], to_bits(words)
    order = tf.cumsum(bits, axis=1, exclusive=True)
    where = tf.where(bits > 0)  # int64 [ones, 2]
    slot = tf.minimum(tf.gather_nd(order, where), slots)
    at = tf.stack([where[:, 0], tf.cast(slot, tf.int64)], axis=1)
    shape = tf.cast(tf.stack([rows, slots + 1]), tf.int64)
    # Surplus positions collide in the last column, which is dropped.
    positions = tf.scatter_nd(at, tf.cast(where[:, 1], tf.int32), shape)[:, :slots]
    count = tf.reduce_sum(bits, axis=1, keepdims=True)
    return tf.ensure_shape(positions, [words.shape[0], slots]), count


def _places(bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return, for 32 codes: word, first bit, whether it crosses words, and bits in the first."""
    word, shift = np.divmod(np.arange(32) * bits, 32)
    crosses = shift + bits > 32
    rest = np.where(crosses, 32 - shift, 0)
    return word.astype(np.int32), shift.astype(np.uint32), crosses, rest.astype(np.uint32)


def _mask(bits: int) -> tf.Tensor:
    return tf.constant(2**bits - 1, tf.uint32)
