"""Huffman codes of the bytes of positions."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tf_redsync.codings.base import Capacity, CodedPositions, IndexCoding
from tf_redsync.codings.streams import Stream
from tf_redsync.config import register
from tf_redsync.ops import bits
from tf_redsync.ops.codecs import Positions
from tf_redsync.ops.wire import leading

LONGEST = 16  # bits of a code


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Huffman(IndexCoding):
    """Huffman codes of the bytes of positions, for a uniform distribution below n.

    One stream per bucket: `[count] [code]`.

    David A. Huffman (1952), "A method for the construction of minimum-redundancy codes",
    Proceedings of the IRE 40. For sparse gradients: Xu et al. (2021), "DeepReduce", NeurIPS.

    One code table serves the four bytes of 32-bit positions. It follows from how often each byte
    occurs in 0 .. n - 1, so it is not sent. High bytes have few values and short codes, but low
    bytes are nearly uniform. The code uses neither the order nor the number of positions: among
    four million elements a position takes 26.9 bits on average, at any density. The capacity
    suffices for the longest codes, of 28 bits. This coding exists for comparison.
    """

    paper: ClassVar[str] = "Huffman 1952"

    @override
    def words(self, capacity: Capacity) -> Any:
        return 1 + _code_words(Stream(capacity))

    @override
    def encode(
        self, indices: Sequence[tf.Tensor], counts: tf.Tensor, capacity: Capacity, seed: tf.Tensor
    ) -> CodedPositions:
        stream, words = Stream(capacity), _code_words(Stream(capacity))
        lengths, codes = table(stream.size)
        at, count = stream.merged(indices, counts), tf.reduce_sum(counts)
        symbols = tf.bitwise.right_shift(at[:, tf.newaxis], tf.constant([0, 8, 16, 24])) & 255
        of_bytes = tf.gather(tf.constant(lengths, tf.int32), symbols)
        valid = leading(count, stream.slots)[:, tf.newaxis]
        code = bits.written(
            tf.reshape(tf.where(valid, tf.gather(tf.constant(codes, tf.int64), symbols), 0), [-1]),
            tf.reshape(tf.where(valid, of_bytes, 0), [-1]),
            words,
        )
        return CodedPositions(tf.concat([count[tf.newaxis], code], axis=0), list(indices), counts)

    @override
    def decode(self, words: tf.Tensor, capacity: Capacity, seed: tf.Tensor) -> Positions:
        stream, (count, code) = (
            Stream(capacity),
            tf.split(words, [1, _code_words(Stream(capacity))], 1),
        )
        symbol_of, length_of = (tf.constant(t) for t in _lookup(stream.size))
        end = 32 * code.shape[1]
        # Pointer jumping: `leap` maps the first bit of a code to that of the next one. Its
        # composition with itself doubles the distance.
        shape = [tf.shape(code)[0], end + 1]
        every_bit = tf.broadcast_to(tf.range(end + 1, dtype=tf.int64), shape)
        window = bits.read(code, every_bit, tf.fill(tf.shape(every_bit), LONGEST))
        leap = tf.minimum(tf.range(end + 1) + tf.gather(length_of, window), end)
        starts = tf.zeros([tf.shape(code)[0], 1], tf.int32)
        while starts.shape[1] < 4 * stream.slots:
            starts = tf.concat([starts, tf.gather(leap, starts, batch_dims=1)], 1)
            leap = tf.gather(leap, leap, batch_dims=1)
        starts = starts[:, : 4 * stream.slots]
        symbols = tf.gather(symbol_of, tf.gather(window, starts, batch_dims=1))
        by_byte = tf.reshape(symbols, [tf.shape(code)[0], stream.slots, 4])
        weights = tf.constant([1, 2**8, 2**16, 2**24], tf.int64)
        at = tf.reduce_sum(tf.cast(by_byte, tf.int64) * weights, axis=2)
        return stream.separated(stream.checked(at, count), count)


@functools.lru_cache(maxsize=64)
def table(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return lengths and codes of the 256 bytes for positions below `size`, first bit lowest.

    Returns:
        Two int64 arrays `[256]`.
    """
    # A minimum frequency bounds the length of all codes by LONGEST.
    occurrences = np.maximum(_byte_counts(size), max(1, math.ceil(4 * size / 2 ** (LONGEST - 3))))
    lengths = _code_lengths(occurrences)
    codes, code, before = np.zeros(256, np.int64), 0, 0
    for length, symbol in sorted(zip(lengths.tolist(), range(256), strict=True)):
        code <<= length - before
        codes[symbol] = int(f"{code:0{length}b}"[::-1], 2)
        code, before = code + 1, length
    return lengths, codes


def _byte_counts(size: int) -> np.ndarray:
    """Return the number of occurrences of each byte in positions below `size`, int64 `[256]`."""
    occurrences = np.zeros(256, np.int64)
    for byte in range(4):
        period, step = 256 ** (byte + 1), 256**byte
        full, rest = divmod(size, period)
        occurrences += full * step + np.clip(rest - step * np.arange(256), 0, step)
    return occurrences


def _code_lengths(occurrences: np.ndarray) -> np.ndarray:
    """Return the depths of the leaves of the Huffman tree."""
    lengths = np.zeros(len(occurrences), np.int64)
    heap = [(int(n), i, [i]) for i, n in enumerate(occurrences)]
    heapq.heapify(heap)
    while len(heap) > 1:
        (n, i, left), (m, _, right) = heapq.heappop(heap), heapq.heappop(heap)
        lengths[left + right] += 1
        heapq.heappush(heap, (n + m, i, left + right))
    return lengths


@functools.lru_cache(maxsize=64)
def _lookup(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the byte and the length of the first code in each word of `LONGEST` bits.

    Returns:
        Two int32 arrays `[2^LONGEST]`.
    """
    lengths, codes = table(size)
    symbols, code_lengths = np.zeros(2**LONGEST, np.int32), np.zeros(2**LONGEST, np.int32)
    for symbol, (length, code) in enumerate(zip(lengths, codes, strict=True)):
        symbols[code :: 2**length], code_lengths[code :: 2**length] = symbol, length
    return symbols, code_lengths


def _code_words(stream: Stream) -> int:
    """Return the words of the longest codes of positions below the stream's size."""
    return -(-stream.slots * _longest(stream.size) // 32)


def _longest(size: int) -> int:
    """Return the bits of the longest code of a position below `size`."""
    lengths, _ = table(size)
    digits = [(size - 1) >> 8 * byte & 255 for byte in range(4)] if size else []
    longest = sum(int(lengths[digit]) for digit in digits)
    for byte, digit in enumerate(digits):  # smaller positions whose highest lower digit is here
        above = sum(int(lengths[d]) for d in digits[byte + 1 :])
        if digit:
            below = int(lengths[:digit].max()) + byte * int(lengths.max())
            longest = max(longest, above + below)
    return longest
