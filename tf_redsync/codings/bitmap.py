"""One bit for every element of a bucket, set where it is sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from typing_extensions import override

from tf_redsync.codings.base import CodedPositions, IndexCoding, Room
from tf_redsync.codings.streams import Stream
from tf_redsync.config import register
from tf_redsync.ops import bits
from tf_redsync.ops.codecs import Positions


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Bitmap(IndexCoding):
    """A bit for every element: the shortest code from a density of some 20 % on."""

    @override
    def words(self, room: Room) -> Any:
        return -(-Stream(room).size // 32)

    @override
    def encode(
        self, indices: Sequence[tf.Tensor], counts: tf.Tensor, room: Room, seed: tf.Tensor
    ) -> CodedPositions:
        stream = Stream(room)
        count = tf.reduce_sum(counts)
        words = bits.bitmap(stream.merged(indices, counts), count, self.words(room))
        return CodedPositions(words, list(indices), counts)

    @override
    def decode(self, words: tf.Tensor, room: Room, seed: tf.Tensor) -> Positions:
        stream = Stream(room)
        at, count = bits.set_bits(words, stream.slots)
        return stream.separated(stream.checked(at, count), count)
