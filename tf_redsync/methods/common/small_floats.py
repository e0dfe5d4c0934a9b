"""All-reduce in floats of 4 bits (E3M0) or 8 bits (E4M3), with float32 sums.

Each run of 256 values has a scale s, its largest magnitude. A value is rounded to the nearest of

    4 bits, E3M0:   0 and +- s 2^-j                for j = 0 .. 6
    8 bits, E4M3:   0, +- s, and +- s (1 + i / 8) 2^-j    for i = 0 .. 7 and j = 1 .. 16

(E4M3: the 127 largest of these magnitudes). A vector is cut into a block for each of the K workers,
and worker b sums block b in float32. With H(x) the rounded x, on worker w, for values p:

    send H(p[b]) to worker b, for every block b                 one all-to-all
    send H(sum over workers of H(p[w])) to all workers          one all-gather

Two workers exchange H(p) in one all-gather: the same bytes, half the latency and one rounding.

There is no error feedback: rounding errors are dropped. `rounded_all_reduce.py` returns them.

Reference: Arthur Douillard et al. (2025), "Streaming DiLoCo with Overlapping Communication", arXiv
2501.18512, section 2.4: the first of the two roundings, and the sums in float32.
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
from tf_redsync.ops.wire import joined, map_words, only_row

RUN = 256  # values that share a scale
MANTISSA_BITS = {4: 0, 8: 3}
_ONE = 0x3F800000  # the bits of 1.0
_FLOAT_MANTISSA = 23
_ZERO = np.int64(0)


class Coded(NamedTuple):
    """Encoded runs of values.

    Attributes:
        codes: int32 `[..., runs, 256]`. The highest bit is the sign, the other bits are the index
            of the magnitude: 0 for zero, 1 for the smallest magnitude.
        scales: Largest magnitude of each run, float32 `[..., runs]`.
    """

    codes: tf.Tensor
    scales: tf.Tensor


def encode(values: tf.Tensor, bits: int) -> Coded:
    """Encode float32 values `[..., runs, 256]`; non-finite values give non-finite scales."""
    scales = tf.reduce_max(tf.abs(values), axis=-1)
    units = tf.math.divide_no_nan(tf.abs(values), scales[..., tf.newaxis])
    drop, first = _FLOAT_MANTISSA - MANTISSA_BITS[bits], _first(bits)
    half = 1 << (drop - 1)
    # int64, since many int32 kernels of GPUs run on the host.
    as_number = tf.cast(tf.bitcast(units, tf.int32), tf.int64)
    numbers = tf.bitwise.right_shift(as_number + half, drop) - (first - 1)
    smallest = _magnitudes(tf.constant(1, tf.int64), bits)
    numbers = tf.where(units < smallest / 2.0, _ZERO, tf.maximum(numbers, 1))
    sign = tf.where(values < 0.0, tf.constant(1 << (bits - 1), tf.int64), _ZERO)
    return Coded(tf.cast(tf.where(numbers > 0, numbers + sign, _ZERO), tf.int32), scales)


def decode(coded: Coded, bits: int) -> tf.Tensor:
    """Decode to float32 `[..., runs, 256]`."""
    codes = tf.cast(coded.codes, tf.int64)
    negative = codes >= 1 << (bits - 1)
    numbers = codes - tf.where(negative, tf.constant(1 << (bits - 1), tf.int64), _ZERO)
    sizes = tf.where(numbers > 0, _magnitudes(numbers, bits), 0.0)
    return tf.where(negative, -sizes, sizes) * coded.scales[..., tf.newaxis]


def _first(bits: int) -> int:
    """Return the upper bits of the smallest magnitude as a float32; the largest magnitude is 1."""
    largest = (1 << (bits - 1)) - 1
    return (_ONE >> (_FLOAT_MANTISSA - MANTISSA_BITS[bits])) - (largest - 1)


def _magnitudes(numbers: tf.Tensor, bits: int) -> tf.Tensor:
    drop = _FLOAT_MANTISSA - MANTISSA_BITS[bits]
    words = tf.bitwise.left_shift(numbers + (_first(bits) - 1), drop)
    return tf.bitcast(tf.cast(words, tf.int32), tf.float32)


def all_reduce(ctx: Context, vector: tf.Tensor, bits: int) -> Generator[Request, Any, tf.Tensor]:
    """Sum a vector over the workers.

    Use it as `sums = yield from all_reduce(...)`.

    Args:
        ctx: Context of the exchange.
        vector: float32 `[n]`, n static.
        bits: 4 or 8.

    Returns:
        The sums, float32 `[n]`.
    """
    workers, size = _blocks(ctx.layout.workers), int(vector.shape[0])
    runs = _runs(size, workers)
    padded = tf.pad(vector, [[0, workers * runs * RUN - size]])
    messages = _messages(tf.reshape(padded, [workers, runs, RUN]), bits)
    if workers == 1:
        messages = yield AllGather(only_row(messages))
        values = _values(messages, runs, bits)
        return tf.reshape(tf.add_n(tf.unstack(values, num=ctx.layout.workers)), [-1])[:size]
    rows = yield AllToAll(messages)
    total = tf.add_n(tf.unstack(_values(rows, runs, bits), num=workers))
    messages = yield AllGather(only_row(_messages(total[tf.newaxis], bits)))
    return tf.reshape(_values(messages, runs, bits), [-1])[:size]


def payloads(size: int, workers: int, bits: int) -> Payloads:
    """Return the payloads of `all_reduce` for `size` elements."""
    blocks = _blocks(workers)
    runs = _runs(size, blocks)
    words = wire.HEADER_WORDS + runs + packed_words(runs * RUN, bits)
    message = wire.BYTES_PER_WORD * words
    if blocks == 1:
        return [(AllGather, message)]
    return [(AllToAll, blocks * message), (AllGather, message)]


def _blocks(workers: int) -> int:
    """Return the number of blocks of a vector; 1 if all workers gather the whole vector."""
    return workers if workers > 2 else 1


def _runs(size: int, blocks: int) -> int:
    """Return the number of runs in a block, at least 1: a fragment may have no elements."""
    return max(1, -(-size // (blocks * RUN)))


def _messages(blocks: tf.Tensor, bits: int) -> tf.Tensor:
    """Encode values `[rows, runs, 256]` as messages `[rows, words]`, all zero if non-finite."""
    rows, runs, _ = blocks.shape
    coded = encode(blocks, bits)
    codes = map_words(lambda c: tf.reshape(c, [rows, runs * RUN]), coded.codes)
    flags = tf.ones([rows, wire.HEADER_WORDS], tf.int32)
    message = joined(flags, wire.to_words(coded.scales), packed(codes, bits), axis=1)
    return wire.zero_unless(wire.all_finite([blocks]), message)


def _values(messages: tf.Tensor, runs: int, bits: int) -> tf.Tensor:
    """Decode messages to float32 `[rows, runs, 256]`."""
    _, scales, words = wire.split(messages, runs)
    codes = unpacked(words, bits, runs * RUN)
    codes = map_words(lambda c: tf.reshape(c, [-1, runs, RUN]), codes)
    return decode(Coded(codes, scales), bits)
