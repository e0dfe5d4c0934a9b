"""Bits in 32-bit words: codes of a fixed and of a varying number of bits, written and read.

Bit t is bit t mod 32 of word t div 32, and the low bit of a code comes first. Words are int32.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf


def packed_words(count: int, bits: int) -> int:
    """Words that `packed` returns for so many codes."""
    return -(-count * bits // 32)


def packed(codes: tf.Tensor, bits: int) -> tf.Tensor:
    """Write codes of `bits` bits one after the other.

    Args:
        codes: int32 `[count]`, of which the low `bits` bits are taken; the count is static.
        bits: In [0, 32].

    Returns:
        int32 `[packed_words(count, bits)]`.
    """
    count = codes.shape[0]
    words = packed_words(count, bits)
    if words == 0:
        return tf.zeros([0], tf.int32)
    # 32 codes make `bits` words, whatever `bits` is.
    rows = tf.reshape(tf.pad(codes, [[0, -count % 32]]), [-1, 32])
    rows = tf.bitwise.bitwise_and(tf.bitcast(rows, tf.uint32), _mask(bits))
    word, shift, crosses, rest = _places(bits)
    low = tf.bitwise.left_shift(rows, shift)
    high = tf.where(crosses, tf.bitwise.right_shift(rows, rest), tf.zeros_like(rows))
    pieces = tf.transpose(tf.bitcast(tf.concat([low, high], axis=1), tf.int32))
    # Codes share no bit, so adding them up is as good as a bitwise or.
    sums = tf.math.unsorted_segment_sum(pieces, np.concatenate([word, word + 1]), bits + 1)
    return tf.reshape(tf.transpose(sums[:bits]), [-1])[:words]


def unpacked(words: tf.Tensor, bits: int, count: int) -> tf.Tensor:
    """Undo `packed`.

    Args:
        words: int32 `[rows, packed_words(count, bits)]`.
        bits: As given to `packed`.
        count: Number of codes.

    Returns:
        int32 `[rows, count]`.
    """
    if packed_words(count, bits) == 0:
        return tf.zeros([tf.shape(words)[0], count], tf.int32)
    groups = -(-count // 32)
    padded = tf.pad(words, [[0, 0], [0, groups * bits - packed_words(count, bits)]])
    grouped = tf.reshape(padded, [-1, groups, bits])
    word, shift, crosses, rest = _places(bits)
    low = tf.bitcast(tf.gather(grouped, word, axis=2), tf.uint32)
    high = tf.bitcast(tf.gather(grouped, np.minimum(word + 1, bits - 1), axis=2), tf.uint32)
    high = tf.where(crosses, tf.bitwise.left_shift(high, rest), tf.zeros_like(high))
    codes = (tf.bitwise.right_shift(low, shift) | high) & _mask(bits)
    return tf.bitcast(tf.reshape(codes, [-1, 32 * groups])[:, :count], tf.int32)


def written(codes: tf.Tensor, lengths: tf.Tensor, words: int) -> tf.Tensor:
    """Write codes of varying lengths one after the other.

    Args:
        codes: int64 `[count]`, each below `2^length`.
        lengths: int32 `[count]`, in [0, 32].
        words: Length of the result. What is beyond is left out.

    Returns:
        int32 `[words]`.
    """
    starts = tf.cumsum(tf.cast(lengths, tf.int64), exclusive=True)
    low = tf.bitwise.left_shift(codes, starts % 32)  # below 2^63
    word = tf.minimum(starts // 32, words)
    pieces = tf.concat(
        [low & 0xFFFFFFFF, tf.bitwise.right_shift(low, tf.constant(32, tf.int64))], 0
    )
    at = tf.minimum(tf.concat([word, word + 1], 0), words)
    # As above, sums in place of a bitwise or.
    sums = tf.scatter_nd(at[:, tf.newaxis], pieces, [words + 1])[:words]
    return tf.bitcast(tf.cast(sums, tf.uint32), tf.int32)


def read(words: tf.Tensor, starts: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
    """Read codes of known places.

    Args:
        words: int32 `[rows, words]`.
        starts: int64 `[rows, count]`, first bit of each code.
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


def bitmap(positions: tf.Tensor, valid: tf.Tensor, words: int) -> tf.Tensor:
    """Set bits.

    Args:
        positions: int32 `[count]`, distinct where `valid`.
        valid: bool `[count]`.
        words: Length of the result.

    Returns:
        int32 `[words]`.
    """
    word = tf.where(valid, positions // 32, words)
    bit = tf.bitwise.left_shift(tf.ones_like(positions), positions % 32)
    return tf.scatter_nd(word[:, tf.newaxis], bit, [words + 1])[:words]


def set_bits(words: tf.Tensor, slots: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Return where bits are set.

    Args:
        words: int32 `[rows, words]`.
        slots: How many positions to return.

    Returns:
        int32 `[rows, slots]`, the first ones, ascending, 0 after the last one; and int32
        `[rows, 1]`, how many there are, which may be more.
    """
    rows = tf.shape(words)[0]
    places = tf.range(32, dtype=tf.int32)
    bits = tf.bitwise.right_shift(words[:, :, tf.newaxis], places) & 1
    return nonzero(tf.reshape(bits, [rows, 32 * words.shape[1]]), slots)


def nonzero(flags: tf.Tensor, slots: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Return where flags are 1, as `set_bits` does; `flags` is int32 `[rows, places]`."""
    rows = tf.shape(flags)[0]
    order = tf.cumsum(flags, axis=1, exclusive=True)
    where = tf.where(flags > 0)  # int64 [found, 2]
    slot = tf.minimum(tf.gather_nd(order, where), slots)
    at = tf.stack([where[:, 0], tf.cast(slot, tf.int64)], axis=1)
    shape = tf.cast(tf.stack([rows, slots + 1]), tf.int64)
    # Only the last column, which is cut off, gets more than one.
    found = tf.scatter_nd(at, tf.cast(where[:, 1], tf.int32), shape)[:, :slots]
    return tf.ensure_shape(found, [flags.shape[0], slots]), tf.reduce_sum(
        flags, axis=1, keepdims=True
    )


def _places(bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Where 32 codes are: word; first bit; whether bits are in the next word; how many are not."""
    word, shift = np.divmod(np.arange(32) * bits, 32)
    crosses = shift + bits > 32
    rest = np.where(crosses, 32 - shift, 0)
    return word.astype(np.int32), shift.astype(np.uint32), crosses, rest.astype(np.uint32)


def _mask(bits: int) -> tf.Tensor:
    return tf.constant(2**bits - 1, tf.uint32)
