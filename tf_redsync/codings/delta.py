"""Differences of positions, packed in groups of 32 with as many bits as the largest one needs."""

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
WIDTH = 5  # bits of the number of bits of a difference below 2^31


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaPacking(IndexCoding):
    """Differences of positions, packed in groups of 32 with as many bits as the largest one needs.

    Packed differences of one stream for a bucket: `[count] [widths] [groups]`.

    The usual way to store ascending integers where decoding must be fast: Daniel Lemire, Leonid
    Boytsov (2015), "Decoding billions of integers per second through vectorization", Software:
    Practice and Experience 45, arXiv 1209.2137; among the codings of sparse gradients: Xu et al.
    (2021), "DeepReduce", NeurIPS.

    A group of 32 differences of w bits takes w words, and 5 bits for w. There is room for the
    widest groups that n allows: one group's largest difference has w bits only if it leaps over
    2^(w - 1) elements, so all groups share n out, evenly at worst.
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
    """Words of the widths, and of the groups at their widest."""
    groups = _groups(stream)
    return [bits.packed_words(groups, WIDTH), _widest(groups, max(stream.size - 1, 0))]


def _widest(groups: int, leaps: int) -> int:
    """Most bits that the largest differences of so many groups can have, `leaps` in all.

    A message may hold fewer positions than it has room for, so they leap over all but one element.
    """
    if not groups:
        return 0
    width = (leaps // groups).bit_length()  # of every group
    rest = leaps - groups * (2**width // 2)
    return groups * width + min(rest // (2**width - 2**width // 2), groups)


def _bit_length(values: tf.Tensor) -> tf.Tensor:
    """Bits of each int32 in [0, 2^31)."""
    thresholds = tf.constant([2**b for b in range(31)], tf.int32)
    if values.shape.num_elements() == 0:
        return tf.zeros_like(values)
    found = tf.searchsorted(thresholds, tf.reshape(values, [-1]), side="right")
    return tf.reshape(found, tf.shape(values))
