"""A bit for every element: the shortest code from a density of some 20 % on, and a plain one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_redsync.codings.base import CodedPositions, IndexCoding, Room
from tf_redsync.codings.streams import Stream
from tf_redsync.config import register
from tf_redsync.ops import bits
from tf_redsync.ops.codecs import Positions


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Bitmap(IndexCoding):
    """One bit for every element of a bucket, set where it is sent."""

    def words(self, room: Room) -> Any:
        """See `IndexCoding`."""
        return -(-Stream(room).size // 32)

    def encode(
        self, indices: Sequence[tf.Tensor], counts: tf.Tensor, room: Room, seed: tf.Tensor
    ) -> CodedPositions:
        """See `IndexCoding`."""
        stream = Stream(room)
        count = tf.reduce_sum(counts)
        words = bits.bitmap(stream.merged(indices, counts), count, self.words(room))
        return CodedPositions(words, list(indices), counts)

    def decode(self, words: tf.Tensor, room: Room, seed: tf.Tensor) -> Positions:
        """See `IndexCoding`."""
        stream = Stream(room)
        at, count = bits.set_bits(words, stream.slots)
        return stream.separated(stream.checked(at, count), count)
