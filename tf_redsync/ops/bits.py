"""Bits in 32-bit words: codes of fixed and of variable length, and bitmaps.

Bit t is bit t mod 32 of word t div 32, and the low bit of a code comes first. Words are int32. All
ops except `read` have a native implementation.
"""

from __future__ import annotations

import tensorflow as tf

from tf_redsync.ops import native
from tf_redsync.ops.codec_checks import check_ints
from tf_redsync.ops.limits import MAX_COUNT
from tf_redsync.ops.message_layout import packed_words
from tf_redsync.ops.native import runs_natively
from tf_redsync.ops.reference import bits as reference

__all__ = ["bitmap", "packed", "packed_words", "read", "set_bits", "unpacked", "written"]

MAX_BITS = 32  # of a code
MAX_BITMAP = 2**26  # words: positions are int32
MAX_LISTED = MAX_BITMAP - 1  # words: numbers of set bits are int32
MAX_LENGTH = 2**57  # words: numbers of bits are int64


def packed(codes: tf.Tensor, bits: int) -> tf.Tensor:
    """Concatenate codes of `bits` bits each.

    Args:
        codes: int32 `[..., count]`; bits above the low `bits` are ignored. In pure TensorFlow the
            count is static.
        bits: In [0, 32].

    Returns:
        int32 `[..., packed_words(count, bits)]`.

    Raises:
        ValueError: If `bits` is out of range.

    Example:
        >>> packed(tf.constant([1, 2, 3]), 4).numpy()
        array([801], dtype=int32)
    """
    check_ints("bits", [bits], 0, MAX_BITS)
    codes = tf.convert_to_tensor(codes, tf.int32)
    if _native(codes):
        return native.load().redsync_pack_bits(codes=codes, bits=bits)
    return reference.packed(codes, bits)


def unpacked(words: tf.Tensor, bits: int, count: int) -> tf.Tensor:
    """Return the codes that `packed` concatenated.

    Args:
        words: int32 `[rows, packed_words(count, bits)]`.
        bits: As given to `packed`.
        count: Number of codes.

    Returns:
        int32 `[rows, count]`.

    Raises:
        ValueError: If `bits` or `count` is out of range.
        tf.errors.InvalidArgumentError: When run, if `words` has a wrong length.
    """
    check_ints("bits", [bits], 0, MAX_BITS)
    check_ints("count", [count], 0, MAX_LENGTH)
    words = tf.convert_to_tensor(words, tf.int32)
    if _native(words):
        return native.load().redsync_unpack_bits(words=words, bits=bits, count=count)
    return reference.unpacked(words, bits, count)


def written(codes: tf.Tensor, lengths: tf.Tensor, words: int) -> tf.Tensor:
    """Concatenate codes of variable length.

    Args:
        codes: int64 `[count]`; bits above the low `lengths` are ignored.
        lengths: int32 `[count]`, the bits of each code, in [0, 32].
        words: Length of the result in words; bits beyond are dropped.

    Returns:
        int32 `[words]`.

    Raises:
        ValueError: If `words` is out of range.
        tf.errors.InvalidArgumentError: When run, if a length is out of range.
    """
    check_ints("words", [words], 0, MAX_LENGTH)
    codes, lengths = tf.convert_to_tensor(codes, tf.int64), tf.convert_to_tensor(lengths, tf.int32)
    if _native(codes):
        return native.load().redsync_write_bits(codes=codes, lengths=lengths, size=words)
    return reference.written(codes, lengths, words)


def read(words: tf.Tensor, starts: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
    """Read codes at given places, with TensorFlow's own ops.

    Args:
        words: int32 `[rows, words]`.
        starts: int64 `[rows, count]`, the first bit of each code.
        lengths: int32 `[rows, count]`, in [0, 32].

    Returns:
        int64 `[rows, count]`; bits beyond the last word are 0.
    """
    unsigned = tf.cast(tf.bitcast(words, tf.uint32), tf.int64)
    unsigned = tf.pad(unsigned, [[0, 0], [0, 2]])
    word = tf.minimum(starts // 32, tf.shape(words, out_type=tf.int64)[1])
    low = tf.bitwise.right_shift(tf.gather(unsigned, word, batch_dims=1), starts % 32)
    high = tf.gather(unsigned, word + 1, batch_dims=1)
    both = low | tf.bitwise.left_shift(high, 32 - starts % 32) & 0x7FFFFFFFFFFFFFFF
    ones = tf.bitwise.left_shift(tf.ones_like(both), tf.cast(lengths, tf.int64)) - 1
    return both & ones


def bitmap(positions: tf.Tensor, count: tf.Tensor | int, words: int) -> tf.Tensor:
    """Return words in which the bits at `positions` are set.

    Args:
        positions: int32 `[slots]`, of which the first `count` ascend.
        count: Number of positions, int32 scalar.
        words: Length of the result in words, at most 2^26.

    Returns:
        int32 `[words]`.

    Raises:
        ValueError: If `words` is out of range.
        tf.errors.InvalidArgumentError: When run, if a count or a position is out of range, or
            positions do not ascend.

    Example:
        >>> bitmap(tf.constant([0, 3, 32]), 3, 2).numpy()
        array([9, 1], dtype=int32)
    """
    check_ints("words", [words], 0, MAX_BITMAP)
    positions = tf.convert_to_tensor(positions, tf.int32)
    count = tf.convert_to_tensor(count, tf.int32)
    if _native(positions):
        return native.load().redsync_bitmap(positions=positions, count=count, size=words)
    return reference.bitmap(positions, count, words)


def set_bits(words: tf.Tensor, slots: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the positions of set bits.

    Args:
        words: int32 `[rows, words]`, at most 2^26 - 1 words, and on a GPU 65,535 rows.
        slots: Largest number of positions to return.

    Returns:
        int32 `[rows, slots]`, the first positions, ascending, 0 after the last one; and int32
        `[rows, 1]`, the number of set bits, which may exceed `slots`.

    Raises:
        ValueError: If `slots` or the number of words is out of range.
    """
    check_ints("slots", [slots], 0, MAX_COUNT)
    words = tf.convert_to_tensor(words, tf.int32)
    if words.shape[1] is not None:
        check_ints("words", [words.shape[1]], 0, MAX_LISTED)
    if _native(words):
        return tuple(native.load().redsync_set_bits(words=words, slots=slots))
    return reference.set_bits(words, slots)


def _native(tensor: tf.Tensor) -> bool:
    return runs_natively([tensor])
