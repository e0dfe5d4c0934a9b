"""Messages of k elements of every chunk: positions in the chunk, in as few bits as these have.

    [flag] then for every tensor, in order,
        [positions in the chunk, ceil(log2(size)) bits each, in whole words] [values]

Values are float32; or two bits each, in whole words, then a scale for each chunk and two levels,
see `two_bit_values.py`. All chunks of a tensor send as many, so there is no count, and a position
in 64 x 64 elements takes 12 bits where one in the tensor takes 32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tf_redsync import ops
from tf_redsync.methods.common import two_bit_values
from tf_redsync.methods.common.chunking import Chunks
from tf_redsync.ops import MessageLayout, wire
from tf_redsync.ops.bits import packed, packed_words, unpacked
from tf_redsync.ops.message_layout import Parts, signed
from tf_redsync.ops.wire import cut, moved


@dataclasses.dataclass(frozen=True)
class ChunkMessages:
    """The messages about the tensors of a bucket.

    Attributes:
        chunks: How each tensor is cut.
        top_k: k, how many elements of a chunk are sent; of a smaller chunk all.
        value_bits: 32 or 2, of a value.
    """

    chunks: tuple[Chunks, ...]
    top_k: int
    value_bits: int = 32

    def k(self, chunks: Chunks) -> int:
        """Return how many elements of a tensor's chunks are sent."""
        return min(self.top_k, chunks.size)

    @property
    def capacities(self) -> list[int]:
        """How many elements of each tensor are sent."""
        return [c.number * self.k(c) for c in self.chunks]

    @property
    def payload(self) -> int:
        """Bytes of a message."""
        return wire.BYTES_PER_WORD * (wire.HEADER_WORDS + sum(self._lengths))

    @property
    def _lengths(self) -> list[int]:
        """Words of the parts of each tensor, in the order of the message."""
        pairs = zip(self.chunks, self.capacities, strict=True)
        return [n for c, count in pairs for n in (packed_words(count, _bits(c)), *self._words(c))]

    def _words(self, chunks: Chunks) -> list[int]:
        """Words of the parts of a tensor's values."""
        count = chunks.number * self.k(chunks)
        if self.value_bits == two_bit_values.BITS:
            codes = packed_words(count, two_bit_values.BITS)
            return [codes, chunks.number, two_bit_values.LEVELS]
        return [count]

    def message(
        self, finite: tf.Tensor, positions: Sequence[tf.Tensor], values: Sequence[tf.Tensor]
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Code what one worker sends.

        Args:
            finite: Bool scalar.
            positions: For each tensor int32 `[number, k]`, of `ops.selection.chunked_top_k`.
            values: For each tensor float32 `[number, k]`.

        Returns:
            The message, int32 `[words]`, all zero unless `finite`; and the values that it stands
            for, as `values`.
        """
        parts, delivered = [], []
        for chunks, at, value in zip(self.chunks, positions, values, strict=True):
            parts.append(packed(_flat(at), _bits(chunks)))
            if self.value_bits == two_bit_values.BITS:
                coded = two_bit_values.encode(value)
                finite &= wire.all_finite(coded[1:])
                parts += [packed(_flat(coded.codes), two_bit_values.BITS), *coded[1:]]
                value = two_bit_values.decode(coded)
            else:
                parts.append(tf.reshape(value, [-1]))
            delivered.append(value)
        return wire.message(finite, *parts), delivered

    def _values(self, chunks: Chunks, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """The values of a tensor that all workers have sent, float32 `[workers, number * k]`."""
        if self.value_bits != two_bit_values.BITS:
            return wire.from_words(parts[0])
        count = chunks.number * self.k(chunks)
        codes = unpacked(parts[0], two_bit_values.BITS, count)
        workers = tf.shape(codes)[0]  # not -1, which an empty tensor leaves open
        shape = [workers, chunks.number, self.k(chunks)]
        codes = moved(lambda c: tf.reshape(c, shape), codes)
        scales, levels = map(wire.from_words, parts[1:])
        values = two_bit_values.decode(two_bit_values.TwoBitValues(codes, scales, levels))
        return tf.reshape(values, [workers, count])

    def sums(self, messages: tf.Tensor) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Add up the messages of all workers, rank by rank.

        Args:
            messages: int32 `[workers, words]`.

        Returns:
            For each tensor float32 `[number, size]`: the sums of the values, and how many workers
            have sent each element.
        """
        lengths = [wire.HEADER_WORDS, *self._lengths]
        flags, *parts = cut(messages, lengths)
        capacities, workers = self.capacities, tf.shape(messages)[0]
        indices, values, following = [], [], iter(parts)
        for chunks, count in zip(self.chunks, capacities, strict=True):
            at = unpacked(next(following), _bits(chunks), count)
            indices.append(self._unsigned_positions(chunks, at))
            words = [next(following) for _ in self._words(chunks)]
            values.append(self._values(chunks, words))
        counts = tf.repeat(tf.constant([capacities], tf.int32), workers, axis=0)
        layout = MessageLayout.of(capacities)
        like = [tf.zeros([c.number, c.size]) for c in self.chunks]

        def summed(numbers: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            plain = layout.join(Parts(flags, counts, indices, numbers))
            return list(ops.decode(plain, layout, like))

        return summed(values), summed([tf.ones_like(v) for v in values])

    def scattered(self, chunks: Chunks, positions: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
        """Return what one worker sends of a tensor, with zeros elsewhere, float32 `[number, size]`.

        Args:
            chunks: How the tensor is cut.
            positions: int32 `[number, k]`.
            values: float32 `[number, k]`.
        """
        at = self._flat_positions(chunks, _flat(positions))[:, tf.newaxis]
        flat = tf.scatter_nd(at, tf.reshape(values, [-1]), [chunks.number * chunks.size])
        return tf.reshape(flat, [chunks.number, chunks.size])

    def _flat_positions(self, chunks: Chunks, positions: tf.Tensor) -> tf.Tensor:
        """Positions in all chunks in a row, int64, of those in each, int32 `[..., number * k]`."""
        first = chunks.size * tf.range(chunks.number, dtype=tf.int64)
        return tf.cast(positions, tf.int64) + tf.repeat(first, self.k(chunks))

    def _unsigned_positions(self, chunks: Chunks, positions: tf.Tensor) -> tf.Tensor:
        """The same as 32 bits without a sign, in int32."""
        return signed(self._flat_positions(chunks, positions))


def _flat(words: tf.Tensor) -> tf.Tensor:
    """All words of a tensor, one after the other."""
    return moved(lambda w: tf.reshape(w, [-1]), words)


def _bits(chunks: Chunks) -> int:
    """Of a position in a chunk."""
    return (chunks.size - 1).bit_length()
