"""Sums over the workers of values in 4 or 8 bits: a sign, an exponent, and perhaps a mantissa.

In each run of 256 values, with s the largest magnitude in it, a value is sent as the nearest of

    4 bits, E3M0:   0 and +- s 2^-j                for j = 0 .. 6
    8 bits, E4M3:   0, +- s, and +- s (1 + i / 8) 2^-j    for i = 0 .. 7 and j = 1 .. 16

(of E4M3 the 127 largest magnitudes). A vector is cut into a block for each of the K workers, and
worker b adds up block b in float32. With H(x) the codes of x, on worker w, for values p:

    H(p[b]) goes to worker b, for every block b                 one all-to-all
    H(sum over the workers of their H(p[w])) goes to all        one all-gather

What rounding loses is lost; who needs it has error feedback around it, or floats of 16 bits, see
`rounded_all_reduce.py`.

Reference: Arthur Douillard et al. (2025), "Streaming DiLoCo with Overlapping Communication", arXiv
2501.18512, section 2.4, which has the first of the two roundings, and adds up in float32.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_redsync.exchange.context import Context
from tf_redsync.exchange.method import Payloads
from tf_redsync.exchange.requests import AllGather, AllToAll, Request
from tf_redsync.ops import wire
from tf_redsync.ops.bits import packed, packed_words, unpacked
from tf_redsync.ops.wire import joined, moved, only_row

RUN = 256  # values that share a scale
MANTISSA_BITS = {4: 0, 8: 3}
_ONE = 0x3F800000  # the bits of 1.0
_FLOAT_MANTISSA = 23
_NOTHING = np.int64(0)


class Coded(NamedTuple):
    """Values in runs.

    Attributes:
        codes: int32 `[..., runs, 256]`: the sign in the highest bit, then the magnitude's number, 0
            for 0 and else counted from the smallest one.
        scales: float32 `[..., runs]`, the largest magnitudes.
    """

    codes: tf.Tensor
    scales: tf.Tensor


def encode(values: tf.Tensor, bits: int) -> Coded:
    """Code float32 values `[..., runs, 256]`; scales are not finite where values are not."""
    scales = tf.reduce_max(tf.abs(values), axis=-1)
    units = tf.math.divide_no_nan(tf.abs(values), scales[..., tf.newaxis])
    drop, first = _FLOAT_MANTISSA - MANTISSA_BITS[bits], _first(bits)
    half = 1 << (drop - 1)
    # Numbers are int64: with int32 GPUs compute on the host.
    as_number = tf.cast(tf.bitcast(units, tf.int32), tf.int64)
    numbers = tf.bitwise.right_shift(as_number + half, drop) - (first - 1)
    smallest = _magnitudes(tf.constant(1, tf.int64), bits)
    numbers = tf.where(units < smallest / 2.0, _NOTHING, tf.maximum(numbers, 1))
    sign = tf.where(values < 0.0, tf.constant(1 << (bits - 1), tf.int64), _NOTHING)
    return Coded(tf.cast(tf.where(numbers > 0, numbers + sign, _NOTHING), tf.int32), scales)


def decode(coded: Coded, bits: int) -> tf.Tensor:
    """Return what the codes stand for, float32 `[..., runs, 256]`."""
    codes = tf.cast(coded.codes, tf.int64)
    negative = codes >= 1 << (bits - 1)
    numbers = codes - tf.where(negative, tf.constant(1 << (bits - 1), tf.int64), _NOTHING)
    sizes = tf.where(numbers > 0, _magnitudes(numbers, bits), 0.0)
    return tf.where(negative, -sizes, sizes) * coded.scales[..., tf.newaxis]


def _first(bits: int) -> int:
    """The high bits, as a float32 has them, of the smallest magnitude: the largest one is 1."""
    largest = (1 << (bits - 1)) - 1
    return (_ONE >> (_FLOAT_MANTISSA - MANTISSA_BITS[bits])) - (largest - 1)


def _magnitudes(numbers: tf.Tensor, bits: int) -> tf.Tensor:
    drop = _FLOAT_MANTISSA - MANTISSA_BITS[bits]
    words = tf.bitwise.left_shift(numbers + (_first(bits) - 1), drop)
    return tf.bitcast(tf.cast(words, tf.int32), tf.float32)


def all_reduce(ctx: Context, vector: tf.Tensor, bits: int) -> Generator[Request, Any, tf.Tensor]:
    """Add up a vector over the workers.

    Use it as `sums = yield from all_reduce(...)`.

    Args:
        ctx: The exchange's.
        vector: float32 `[n]`, n static.
        bits: 4 or 8.

    Returns:
        The sums, float32 `[n]`, rounded twice.
    """
    workers, size = ctx.layout.workers, int(vector.shape[0])
    runs = _runs(size, workers)
    padded = tf.pad(vector, [[0, workers * runs * RUN - size]])
    rows = yield AllToAll(_messages(tf.reshape(padded, [workers, runs, RUN]), bits))
    total = tf.add_n(tf.unstack(_values(rows, runs, bits), num=workers))
    messages = yield AllGather(only_row(_messages(total[tf.newaxis], bits)))
    return tf.reshape(_values(messages, runs, bits), [-1])[:size]


def payloads(size: int, workers: int, bits: int) -> Payloads:
    """Return the payloads of `all_reduce` of `size` elements."""
    runs = _runs(size, workers)
    words = wire.HEADER_WORDS + runs + packed_words(runs * RUN, bits)
    message = wire.BYTES_PER_WORD * words
    return [(AllToAll, workers * message), (AllGather, message)]


def _runs(size: int, workers: int) -> int:
    """Of a worker's block."""
    return -(-size // (workers * RUN))


def _messages(blocks: tf.Tensor, bits: int) -> tf.Tensor:
    """Rows of values `[rows, runs, 256]` as messages, `[rows, words]`; all zero if not finite."""
    rows, runs, _ = blocks.shape
    coded = encode(blocks, bits)
    codes = moved(lambda c: tf.reshape(c, [rows, runs * RUN]), coded.codes)
    flags = tf.ones([rows, wire.HEADER_WORDS], tf.int32)
    message = joined(flags, wire.to_words(coded.scales), packed(codes, bits), axis=1)
    return wire.zero_unless(wire.all_finite([blocks]), message)


def _values(messages: tf.Tensor, runs: int, bits: int) -> tf.Tensor:
    """Undo `_messages`, as float32 `[rows, runs, 256]`."""
    _, scales, words = wire.split(messages, runs)
    codes = unpacked(words, bits, runs * RUN)
    codes = moved(lambda c: tf.reshape(c, [-1, runs, RUN]), codes)
    return decode(Coded(codes, scales), bits)
