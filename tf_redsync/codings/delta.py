"""Differences of positions, bit-packed in groups of 32."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import tensorflow as tf
from typing_extensions import override

from tf_redsync.codings.base import Capacity, CodedPositions, IndexCoding, used
from tf_redsync.codings.streams import Stream, gaps
from tf_redsync.config import register
from tf_redsync.ops import bits
from tf_redsync.ops.codecs import Positions

GROUP = 32
WIDTH = 5  # bits of a group's width, which is at most 31


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaPacking(IndexCoding):
    """Differences of positions, bit-packed in groups of 32 at the width of the largest.

    One stream per bucket: `[count] [widths] [groups]`.

    A common format for ascending integers that must decode fast: Daniel Lemire, Leonid Boytsov
    (2015), "Decoding billions of integers per second through vectorization", Software: Practice and
    Experience 45, arXiv 1209.2137. For sparse gradients: Xu et al. (2021), "DeepReduce", NeurIPS.

    A group of 32 differences of w bits takes w words, plus 5 bits for w. The capacity suffices for
    the widest groups among n elements: a difference of w bits skips at least 2^(w - 1) elements,
    and the worst case divides n evenly between the groups.
    """

    paper: ClassVar[str] = "Lemire, Boytsov 2015"

    @override
    def words(self, capacity: Capacity) -> Any:
        return 1 + sum(_lengths(Stream(capacity)))

    @override
    def encode(
        self, indices: Sequence[tf.Tensor], counts: tf.Tensor, capacity: Capacity, seed: tf.Tensor
    ) -> CodedPositions:
        stream, words = Stream(capacity), _lengths(Stream(capacity))[1]
        at, count, groups = stream.merged(indices, counts), tf.reduce_sum(counts), _groups(stream)
        deltas = used(gaps(at) - 1, count)
        rows = tf.reshape(tf.pad(deltas, [[0, GROUP * groups - stream.slots]]), [groups, GROUP])
        widths = tf.reduce_max(_bit_length(rows), axis=1)
        codes = tf.cast(tf.reshape(rows, [-1]), tf.int64)
        packed = bits.written(codes, tf.repeat(widths, GROUP), words)
        code = [count[tf.newaxis], bits.packed(widths, WIDTH), packed]
        return CodedPositions(tf.concat(code, axis=0), list(indices), counts)

    @override
    def decode(self, words: tf.Tensor, capacity: Capacity, seed: tf.Tensor) -> Positions:
        stream, groups = Stream(capacity), _groups(Stream(capacity))
        count, width_words, code = tf.split(words, [1, *_lengths(stream)], axis=1)
        widths = bits.unpacked(width_words, WIDTH, groups)
        lengths = tf.repeat(widths, GROUP, axis=1)
        starts = tf.cumsum(tf.cast(lengths, tf.int64), axis=1, exclusive=True)
        deltas = bits.read(code, starts, lengths)[:, : stream.slots]
        at = tf.cumsum(deltas + 1, axis=1) - 1
        return stream.separated(stream.checked(at, count), count)


def _groups(stream: Stream) -> int:
    return -(-stream.slots // GROUP)


def _lengths(stream: Stream) -> list[int]:
    """Return the words of the widths, and of the groups in the worst case."""
    groups = _groups(stream)
    return [bits.packed_words(groups, WIDTH), _widest(groups, max(stream.size - 1, 0))]


def _widest(groups: int, leaps: int) -> int:
    """Return the maximum sum of the groups' widths if all differences add up to at most `leaps`.

    A message may hold fewer positions than its capacity, so the differences may skip all elements
    but one.
    """
    if not groups:
        return 0
    width = (leaps // groups).bit_length()  # reached by all groups in the worst case
    rest = leaps - groups * (2**width // 2)
    return groups * width + min(rest // (2**width - 2**width // 2), groups)


def _bit_length(values: tf.Tensor) -> tf.Tensor:
    """Return the bit lengths of int32 in [0, 2^31)."""
    thresholds = tf.constant([2**b for b in range(31)], tf.int32)
    if values.shape.num_elements() == 0:
        return tf.zeros_like(values)
    lengths = tf.searchsorted(thresholds, tf.reshape(values, [-1]), side="right")
    return tf.reshape(lengths, tf.shape(values))
