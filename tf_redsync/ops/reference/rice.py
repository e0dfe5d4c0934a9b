"""Pure-TensorFlow reference of `ops/rice.py`."""

from __future__ import annotations

import tensorflow as tf

from tf_redsync.ops.limits import MAX_COUNT
from tf_redsync.ops.message_layout import packed_words
from tf_redsync.ops.reference import bits
from tf_redsync.ops.reference.common import after, assert_none, assert_shape


def rice_encode(numbers: tf.Tensor, rice: int, bitmap_words: int) -> tf.Tensor:
    """See `tf_redsync.ops.rice_encode`; all arguments are given and already checked."""
    size = numbers.shape[0]
    zigzag = tf.bitwise.left_shift(numbers, 1) ^ tf.bitwise.right_shift(numbers, 31)
    zeros = tf.bitwise.right_shift(tf.bitcast(zigzag, tf.uint32), tf.constant(rice, tf.uint32))
    ones = tf.cumsum(tf.cast(zeros, tf.int64)) + tf.range(size, dtype=tf.int64)
    check = assert_none("numbers", "length", ones >= 32 * bitmap_words, ones + 1, None)
    ones = tf.cast(after([check], ones), tf.int32)
    low = bits.packed(zigzag, rice)
    return tf.concat([low, bits.to_bitmap(ones, size, bitmap_words)], axis=0)


def rice_decode(codes: tf.Tensor, rice: int, bitmap_words: int, count: int) -> tf.Tensor:
    """See `tf_redsync.ops.rice_decode`; all arguments are given and already checked."""
    lengths = [packed_words(count, rice), bitmap_words]
    codes = after([assert_shape("codes", codes, [-1, sum(lengths)])], codes)
    low, bitmap = tf.split(codes, lengths, axis=1)
    ones, ones_count = bits.set_bits(bitmap, count)
    bad = tf.not_equal(ones_count, count) & tf.not_equal(ones_count, 0)
    checks = [assert_none("codes", "number of ones", bad, ones_count, None)]
    zeros = ones - tf.pad(ones[:, :-1], [[0, 0], [1, 0]], constant_values=-1)[:, :count] - 1
    limit = min((2**32 - 1) >> rice, MAX_COUNT)
    checks.append(
        assert_none("codes", "number of zeros", (ones_count > 0) & (zeros > limit), zeros, None)
    )
    zeros = tf.bitcast(after(checks, zeros), tf.uint32)
    zigzag = tf.bitwise.left_shift(zeros, tf.constant(rice, tf.uint32))
    zigzag |= tf.bitcast(bits.unpacked(low, rice, count), tf.uint32)
    half = tf.bitcast(tf.bitwise.right_shift(zigzag, tf.constant(1, tf.uint32)), tf.int32)
    numbers = half ^ -tf.bitcast(zigzag & 1, tf.int32)
    return tf.where(ones_count > 0, numbers, 0)
