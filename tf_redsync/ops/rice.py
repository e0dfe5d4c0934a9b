"""Rice codes of signed integers, short if most of them are near zero.

The zigzag number of x is z = 2 x if x >= 0, else -2 x - 1. A code has two parts: the low r bits of
each z (see `bits.packed`), and a bitmap of z >> r zeros and a one for each z. A bitmap without
ones decodes to zeros.
"""

from __future__ import annotations

import tensorflow as tf

from tf_redsync.ops import native
from tf_redsync.ops.bits import MAX_BITMAP
from tf_redsync.ops.codec_checks import check_ints
from tf_redsync.ops.golomb import MAX_RICE
from tf_redsync.ops.limits import MAX_COUNT
from tf_redsync.ops.native import runs_natively
from tf_redsync.ops.reference import rice as reference


def rice_encode(numbers: tf.Tensor, *, rice: int, bitmap_words: int) -> tf.Tensor:
    """Code integers.

    Args:
        numbers: int32 `[count]`; in pure TensorFlow the count is static.
        rice: r, in [0, 30].
        bitmap_words: Words of the bitmap, at most 2^26. It needs `count` bits plus all z >> r.

    Returns:
        int32 `[bits.packed_words(count, rice) + bitmap_words]`.

    Raises:
        ValueError: If `rice` or `bitmap_words` is out of range.
        tf.errors.InvalidArgumentError: When run, if the bitmap is too short.

    Reference:
        Robert F. Rice, "Some practical universal noiseless coding techniques", JPL 1979.

    Example:
        >>> code = rice_encode(tf.constant([0, -1, 2]), rice=1, bitmap_words=1)
        >>> code.numpy()  # z = 0, 1, 4: low bits 0, 1, 0; bitmap 1, 1, 001
        array([ 2, 19], dtype=int32)
    """
    _check(rice, bitmap_words)
    numbers = tf.convert_to_tensor(numbers, tf.int32)
    encode = reference.rice_encode
    if runs_natively([numbers]):
        encode = native.load().redsync_rice_encode
    return encode(numbers=numbers, rice=rice, bitmap_words=bitmap_words)


def rice_decode(codes: tf.Tensor, *, rice: int, bitmap_words: int, count: int) -> tf.Tensor:
    """Decode the integers of all workers.

    Args:
        codes: int32 `[P, words]`; row r is the code of the worker of rank r. P is at most 65,535 on
            a GPU.
        rice: As given to `rice_encode`.
        bitmap_words: As given to `rice_encode`.
        count: Number of integers of each worker.

    Returns:
        int32 `[P, count]`.

    Raises:
        ValueError: If `rice`, `bitmap_words` or `count` is out of range.
        tf.errors.InvalidArgumentError: When run, if a code has a wrong length, a number of ones
            other than `count` and 0, or an integer that overflows int32.
    """
    _check(rice, bitmap_words)
    check_ints("count", [count], 0, MAX_COUNT)
    codes = tf.convert_to_tensor(codes, tf.int32)
    decode = reference.rice_decode
    if runs_natively([codes]):
        decode = native.load().redsync_rice_decode
    return decode(codes=codes, rice=rice, bitmap_words=bitmap_words, count=count)


def _check(rice: int, bitmap_words: int) -> None:
    check_ints("rice", [rice], 0, MAX_RICE)
    check_ints("bitmap_words", [bitmap_words], 0, MAX_BITMAP)
