"""Plain codes: positions as integers or as a bitmap, values in 32 or 16 bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.codings.base import (
    Capacity,
    CodedPositions,
    CodedValues,
    IndexCoding,
    ValueCoding,
    used,
)
from tf_redsync.codings.streams import Stream
from tf_redsync.config import register
from tf_redsync.ops import bits, wire
from tf_redsync.ops.codecs import Positions
from tf_redsync.ops.wire import cut, joined

HALVES = ("float16", "bfloat16")


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class RawIndices(IndexCoding):
    """32 bits per position: `[counts] [indices of tensor 0] [indices of tensor 1] ...`."""

    any_slots: ClassVar[bool] = True

    @override
    def words(self, capacity: Capacity) -> Any:
        return len(capacity.slots) + sum(capacity.slots)

    @override
    def encode(
        self, indices: Sequence[tf.Tensor], counts: tf.Tensor, capacity: Capacity, seed: tf.Tensor
    ) -> CodedPositions:
        return CodedPositions(joined(counts, *indices), list(indices), counts)

    @override
    def decode(self, words: tf.Tensor, capacity: Capacity, seed: tf.Tensor) -> Positions:
        lengths = [len(capacity.slots), *capacity.slots]
        counts, *indices = cut(words, lengths)
        return Positions(indices, counts)


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Bitmap(IndexCoding):
    """One bit for every element of a bucket; the shortest code above a density of a third."""

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


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Float32(ValueCoding):
    """32 bits per value."""

    exact: ClassVar[bool] = True
    any_slots: ClassVar[bool] = True

    @override
    def words(self, slots: Sequence[Any]) -> Any:
        return sum(slots)

    @override
    def encode(
        self, values: Sequence[tf.Tensor], counts: tf.Tensor, stream: tf.Tensor
    ) -> CodedValues:
        return CodedValues(wire.to_words(tf.concat(list(values), axis=0)), list(values))

    @override
    def decode(self, words: tf.Tensor, counts: tf.Tensor, slots: Sequence[Any]) -> list[tf.Tensor]:
        parts = tf.split(wire.from_words(words), list(slots), axis=1)
        return [used(part, counts[:, i : i + 1]) for i, part in enumerate(parts)]


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Half(ValueCoding):
    """16 bits per value, two values in a word.

    Args:
        dtype: `"float16"` or `"bfloat16"`. A value that overflows float16 makes the step
            non-finite.
    """

    dtype: str = "bfloat16"

    any_slots: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checks.choice("dtype", self.dtype, HALVES)

    @override
    def words(self, slots: Sequence[Any]) -> Any:
        return sum((k + 1) // 2 for k in slots)

    @override
    def encode(
        self, values: Sequence[tf.Tensor], counts: tf.Tensor, stream: tf.Tensor
    ) -> CodedValues:
        words, rounded = [], []
        for tensor in values:
            halves = tf.cast(tensor, self.dtype)
            rounded.append(tf.cast(halves, tf.float32))
            even = tf.pad(halves, [[0, tf.size(halves) % 2]])
            words.append(tf.bitcast(tf.reshape(even, [-1, 2]), tf.int32))
        return CodedValues(joined(*words), rounded)

    @override
    def decode(self, words: tf.Tensor, counts: tf.Tensor, slots: Sequence[Any]) -> list[tf.Tensor]:
        lengths = [(k + 1) // 2 for k in slots]
        parts = cut(words, lengths)
        values = []
        for i, (part, k) in enumerate(zip(parts, slots, strict=True)):
            halves = tf.bitcast(part, tf.as_dtype(self.dtype))
            rows = tf.reshape(halves, [tf.shape(words)[0], 2 * tf.shape(part)[1]])
            values.append(used(tf.cast(rows[:, :k], tf.float32), counts[:, i : i + 1]))
        return values
