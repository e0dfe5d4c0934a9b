"""Messages of k elements per chunk, with positions relative to the chunk.

    [flag] then for each group of chunks, in order,
        [positions in the chunk, ceil(log2(size)) bits each, padded to whole words] [values]

Values are float32; or two bits each, padded to whole words, followed by a scale per chunk and two
levels per tensor, see `two_bit_values.py`. All chunks of a group send the same number of elements,
so the message has no count. A position in a chunk of 64 x 64 elements takes 12 bits; a position in
a whole tensor takes 32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tf_redsync import ops
from tf_redsync.methods.common import two_bit_values
from tf_redsync.methods.common.chunking import ChunkedBucket, ChunkGroup
from tf_redsync.ops import MessageLayout, wire
from tf_redsync.ops.bits import packed, packed_words, unpacked
from tf_redsync.ops.message_layout import Parts, signed
from tf_redsync.ops.wire import cut, map_words


@dataclasses.dataclass(frozen=True)
class ChunkMessages(ChunkedBucket):
    """Encoder and decoder of the messages of one bucket.

    Attributes:
        top_k: k, the number of elements sent per chunk. A smaller chunk is sent whole.
        value_bits: Bits per value, 32 or 2.
    """

    top_k: int
    value_bits: int = 32

    def k(self, group: ChunkGroup) -> int:
        """Return the number of elements sent per chunk."""
        return min(self.top_k, group.size)

    @property
    def capacities(self) -> list[int]:
        """Number of elements sent of each group."""
        return [g.number * self.k(g) for g in self.groups]

    @property
    def payload(self) -> int:
        """Size of a message in bytes."""
        return wire.BYTES_PER_WORD * (wire.HEADER_WORDS + sum(self._lengths))

    @property
    def _lengths(self) -> list[int]:
        """Words of each part of the message, in order."""
        pairs = zip(self.groups, self.capacities, strict=True)
        return [n for g, count in pairs for n in (packed_words(count, _bits(g)), *self._words(g))]

    def _words(self, group: ChunkGroup) -> list[int]:
        """Return the words of each part of a group's values."""
        count = group.number * self.k(group)
        if self.value_bits == two_bit_values.BITS:
            codes = packed_words(count, two_bit_values.BITS)
            return [codes, group.number, two_bit_values.LEVELS * len(group.tensors)]
        return [count]

    def message(
        self, finite: tf.Tensor, positions: Sequence[tf.Tensor], values: Sequence[tf.Tensor]
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Encode the message of one worker.

        Args:
            finite: Bool scalar.
            positions: For each group int32 `[number, k]`, of `ops.selection.chunked_top_k`.
            values: For each group float32 `[number, k]`.

        Returns:
            The message, int32 `[words]`, all zero unless everything is finite; and the values that
            the receivers decode, in the shapes of `values`.
        """
        parts, delivered = [], []
        for group, at, value in zip(self.groups, positions, values, strict=True):
            parts.append(packed(_flat(at), _bits(group)))
            if self.value_bits == two_bit_values.BITS:
                coded = two_bit_values.encode(value, group.numbers)
                finite &= wire.all_finite(coded[1:])
                codes = packed(_flat(coded.codes), two_bit_values.BITS)
                parts += [codes, coded.scales, tf.reshape(coded.levels, [-1])]
                value = two_bit_values.decode(coded, group.numbers)
            else:
                parts.append(tf.reshape(value, [-1]))
            delivered.append(value)
        return wire.message(finite, *parts), delivered

    def _values(self, group: ChunkGroup, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """Decode the values of a group, float32 `[workers, number * k]`."""
        if self.value_bits != two_bit_values.BITS:
            return wire.from_words(parts[0])
        count = group.number * self.k(group)
        codes = unpacked(parts[0], two_bit_values.BITS, count)
        workers = tf.shape(codes)[0]  # -1 would be ambiguous for an empty tensor
        shape = [workers, group.number, self.k(group)]
        codes = map_words(lambda c: tf.reshape(c, shape), codes)
        scales, levels = map(wire.from_words, parts[1:])
        levels = tf.reshape(levels, [workers, len(group.tensors), two_bit_values.LEVELS])
        coded = two_bit_values.TwoBitValues(codes, scales, levels)
        return tf.reshape(two_bit_values.decode(coded, group.numbers), [workers, count])

    def sums(self, messages: tf.Tensor) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Sum the messages of all workers, in rank order.

        Args:
            messages: int32 `[workers, words]`.

        Returns:
            For each group the sums of the values, and the number of workers that sent each
            element; both float32 `[number, size]`.
        """
        lengths = [wire.HEADER_WORDS, *self._lengths]
        flags, *parts = cut(messages, lengths)
        capacities = self.capacities
        indices, values, following = [], [], iter(parts)
        for group, count in zip(self.groups, capacities, strict=True):
            at = unpacked(next(following), _bits(group), count)
            indices.append(self._unsigned_positions(group, at))
            words = [next(following) for _ in self._words(group)]
            values.append(self._values(group, words))
        # The counts depend on the flags, so they are no constants: on a GPU they are moved as
        # floats, and TensorFlow's constant folding would flush their bits, which are denormals.
        counts = tf.repeat(flags, len(capacities), axis=1) * tf.constant([capacities], tf.int32)
        layout = MessageLayout.of(capacities)
        like = [tf.zeros([g.number, g.size]) for g in self.groups]

        def summed(numbers: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            plain = layout.join(Parts(flags, counts, indices, numbers))
            return list(ops.decode(plain, layout, like))

        return summed(values), summed([tf.ones_like(v) for v in values])

    def scattered(self, group: ChunkGroup, positions: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
        """Scatter the elements that one worker sends into zeros, float32 `[number, size]`.

        Args:
            group: The group.
            positions: int32 `[number, k]`.
            values: float32 `[number, k]`.
        """
        at = self._flat_positions(group, _flat(positions))[:, tf.newaxis]
        flat = tf.scatter_nd(at, tf.reshape(values, [-1]), [group.number * group.size])
        return tf.reshape(flat, [group.number, group.size])

    def _flat_positions(self, group: ChunkGroup, positions: tf.Tensor) -> tf.Tensor:
        """Return int64 positions in the flat chunks for positions `[..., number * k]` in each."""
        first = group.size * tf.range(group.number, dtype=tf.int64)
        return tf.cast(positions, tf.int64) + tf.repeat(first, self.k(group))

    def _unsigned_positions(self, group: ChunkGroup, positions: tf.Tensor) -> tf.Tensor:
        """Return `_flat_positions` as unsigned 32-bit numbers, in int32."""
        return signed(self._flat_positions(group, positions))


def _flat(words: tf.Tensor) -> tf.Tensor:
    """Flatten a tensor of words."""
    return map_words(lambda w: tf.reshape(w, [-1]), words)


def _bits(group: ChunkGroup) -> int:
    """Return the bits per position in a chunk."""
    return (group.size - 1).bit_length()
