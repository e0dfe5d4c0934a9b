"""Elias-Fano codes of positions."""

from __future__ import annotations

import dataclasses
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
from tf_redsync.ops.wire import cut, joined


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class EliasFano(IndexCoding):
    """Elias-Fano codes: at most 2 + log2(n / k) bits per position, for all positions.

    One stream per bucket: `[count] [low bits] [bitmap]`.

    Peter Elias (1974), "Efficient storage and retrieval by content and address of static files",
    Journal of the ACM 21; Robert M. Fano (1971), "On the number of bits required to implement an
    associative memory", MIT.

    For k ascending positions below n, the low l = floor(log2(n / k)) bits of each are stored
    verbatim. The high bits h_i of position i are stored in a bitmap of k + (n >> l) bits, in which
    bit h_i + i is set. The length does not depend on the positions, and decoding is parallel.
    """

    paper: ClassVar[str] = "Elias 1974; Fano 1971"

    @override
    def words(self, capacity: Capacity) -> Any:
        return 1 + sum(_lengths(Stream(capacity)))

    @override
    def encode(
        self, indices: Sequence[tf.Tensor], counts: tf.Tensor, capacity: Capacity, seed: tf.Tensor
    ) -> CodedPositions:
        stream = Stream(capacity)
        at, count, low = stream.merged(indices, counts), tf.reduce_sum(counts), _low_bits(stream)
        high = tf.cast(tf.bitwise.right_shift(at, low), tf.int64) + np.arange(stream.slots)
        code = [
            count[tf.newaxis],
            bits.packed(at, low),
            bits.bitmap(tf.cast(high, tf.int32), count, _lengths(stream)[1]),
        ]
        return CodedPositions(joined(*code), list(indices), counts)

    @override
    def decode(self, words: tf.Tensor, capacity: Capacity, seed: tf.Tensor) -> Positions:
        stream = Stream(capacity)
        lengths = [1, *_lengths(stream)]
        count, low_words, high_words = cut(words, lengths)
        low = _low_bits(stream)
        high, ones = bits.set_bits(high_words, stream.slots)
        high = tf.cast(high, tf.int64) - np.arange(stream.slots)
        rest = tf.cast(bits.unpacked(low_words, low, stream.slots), tf.int64)
        at = tf.bitwise.left_shift(high, tf.constant(low, tf.int64)) | rest
        return stream.separated(stream.checked(at, count, ones), count)


def _low_bits(stream: Stream) -> int:
    """Return l = floor(log2(n / k)), at least 0."""
    return max(0, (stream.size // max(stream.slots, 1)).bit_length() - 1)


def _lengths(stream: Stream) -> list[int]:
    """Return the words of the low bits and of the bitmap."""
    low = _low_bits(stream)
    high = stream.slots + (stream.size >> low)
    return [bits.packed_words(stream.slots, low), -(-high // 32)]
