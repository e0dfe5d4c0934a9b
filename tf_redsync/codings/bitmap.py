"""One bit for every element of a bucket, set where it is sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from typing_extensions import override

from tf_redsync.codings.base import Capacity, CodedPositions, IndexCoding
from tf_redsync.codings.streams import Stream
from tf_redsync.config import register
from tf_redsync.ops import bits
from tf_redsync.ops.codecs import Positions


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Bitmap(IndexCoding):
    """A bit for every element: the shortest code from a density of some 20 % on."""

    @override
    def words(self, capacity: Capacity) -> Any:
        return -(-Stream(capacity).size // 32)

    @override
    def encode(
        self, indices: Sequence[tf.Tensor], counts: tf.Tensor, capacity: Capacity, seed: tf.Tensor
    ) -> CodedPositions:
        stream = Stream(capacity)
        count = tf.reduce_sum(counts)
        words = bits.bitmap(stream.merged(indices, counts), count, self.words(capacity))
        return CodedPositions(words, list(indices), counts)

    @override
    def decode(self, words: tf.Tensor, capacity: Capacity, seed: tf.Tensor) -> Positions:
        stream = Stream(capacity)
        at, count = bits.set_bits(words, stream.slots)
        return stream.separated(stream.checked(at, count), count)
