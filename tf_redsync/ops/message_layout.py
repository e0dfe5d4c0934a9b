"""The layout of messages with the selected elements of several tensors.

A message is a vector of 32-bit words, equal in length on all workers:

    [flag] then for every tensor, in order,
        not quantized:  [count, index * capacity, value * capacity]
        quantized:      [count, mean, index * capacity]

`flag` is 1 if all accumulated values are finite; otherwise all words are 0. Indices are unsigned
32-bit positions in the flattened tensor, ascending; values and means are float32. All are
*bit-cast* to int32, never converted, so that no index or value loses a bit. Unused slots hold 0.

`MessageLayout` implements this layout in Python; `custom_ops/core/message_layout.h` implements it
in C++, for CPUs and GPUs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_redsync.ops.wire import HEADER_WORDS, joined, map_words

COUNT_WORDS = 1
MEAN_WORDS = 1


def packed_words(count: int, bits: int) -> int:
    """Return the 32-bit words of `count` codes of `bits` bits."""
    return -(-count * bits // 32)


def golomb_sections(size: int, slots: int, rice: int) -> tuple[int, int]:
    """Return the words of the low bits and of the bitmap of any `slots` positions below `size`.

    See `ops/golomb.py`.
    """
    return packed_words(slots, rice), packed_words(slots + ((size - slots) >> rice), 1)


def unsigned(indices: tf.Tensor) -> tf.Tensor:
    """Return positions, the bits of unsigned integers in int32 or float32, as int64."""
    return tf.cast(tf.bitcast(indices, tf.uint32), tf.int64)


def signed(positions: tf.Tensor) -> tf.Tensor:
    """Return int64 positions as the bits of unsigned integers in int32."""
    return tf.bitcast(tf.cast(positions, tf.uint32), tf.int32)


class Parts(NamedTuple):
    """The parts of messages with elements of N tensors.

    Attributes:
        flags: int32 `[..., 1]`.
        counts: int32 `[..., N]`.
        indices: N int32 tensors `[..., capacity]`, the bits of unsigned positions. Only the first
            `counts` are used. The others name element 0; `wire.leading` masks them.
        values: N float32 tensors `[..., capacity]`; for a quantized tensor its mean, `[..., 1]`.
    """

    flags: tf.Tensor
    counts: tf.Tensor
    indices: Sequence[tf.Tensor]
    values: Sequence[tf.Tensor]


@dataclasses.dataclass(frozen=True)
class MessageLayout:
    """The layout of a message; see the module's docstring.

    Attributes:
        capacities: Largest number of elements of each tensor in a message (`slots` in `codings/`,
            `k` in the native ops): Python ints, or int32 scalars if the method's density changes
            from step to step.
        quantized: For each tensor, whether one mean replaces its values.
    """

    capacities: tuple[Any, ...]
    quantized: tuple[bool, ...]

    def __post_init__(self) -> None:
        if len(self.quantized) != len(self.capacities):
            raise self._bad_lengths()

    def _bad_lengths(self) -> ValueError:
        return ValueError(
            "`k` and `quantized` must have one entry per tensor. Received: "
            f"{len(self.quantized)} quantized for {len(self.capacities)} k."
        )

    @classmethod
    def of(
        cls, k: tf.Tensor | Sequence[int], quantized: bool | Sequence[bool] = False
    ) -> MessageLayout:
        """Return the layout for `k` elements of each tensor.

        Args:
            k: Python ints, or int32 `[N]`, whose values may be unknown in a trace.
            quantized: One bool for each tensor, or one for all.

        Raises:
            ValueError: If `k` and `quantized` differ in length.

        Example:
            >>> MessageLayout.of([10, 4], [False, True]).words
            28
        """
        known = tf.get_static_value(k) if tf.is_tensor(k) else k
        capacities = tuple(tf.unstack(k) if known is None else map(int, known))
        if isinstance(quantized, bool):
            quantized = [quantized] * len(capacities)
        return cls(capacities, tuple(map(bool, quantized)))

    @property
    def is_static(self) -> bool:
        """Whether all capacities are Python ints."""
        return not any(map(tf.is_tensor, self.capacities))

    @property
    def k(self) -> tf.Tensor:
        """The capacities as an int32 tensor `[N]`, for the native ops."""
        if self.is_static:
            return tf.constant(self.capacities, tf.int32)
        return tf.stack(self.capacities)

    @property
    def words(self) -> Any:
        """Length of a message in 32-bit words: a Python int or an int32 scalar."""
        return HEADER_WORDS + sum(self._lengths)

    @property
    def _lengths(self) -> list[Any]:
        """Words of the three parts of each tensor, in the order of the message."""
        lengths: list[Any] = []
        for capacity, one_mean in zip(self.capacities, self.quantized, strict=True):
            lengths += [COUNT_WORDS, MEAN_WORDS if one_mean else capacity, capacity]
        return lengths

    def split(self, messages: tf.Tensor) -> Parts:
        """Split messages into their parts.

        Args:
            messages: int32 `[words]`, or `[P, words]`.
        """
        parts = self.split_floats(messages)
        flags, counts = (tf.bitcast(x, tf.int32) for x in parts[:2])
        return Parts(flags, counts, [tf.bitcast(x, tf.int32) for x in parts.indices], parts.values)

    def split_floats(self, messages: tf.Tensor) -> Parts:
        """Split messages into their parts, of which all are float32 with the bits of `split`'s.

        GPUs would split and join int32 in host memory.
        """
        words = tf.bitcast(messages, tf.float32)
        flags, *parts = tf.split(words, [HEADER_WORDS, *self._lengths], axis=-1)
        indices, values = [], []
        for second, third, one_mean in zip(parts[1::3], parts[2::3], self.quantized, strict=True):
            indices.append(third if one_mean else second)
            values.append(second if one_mean else third)
        return Parts(flags, tf.concat(parts[0::3], axis=-1), indices, values)

    def counts(self, message: tf.Tensor) -> tf.Tensor:
        """Return the number of elements of each tensor in a message, int32 `[N]`.

        Args:
            message: int32 `[words]`.
        """
        if not self.is_static:
            return self.split(message).counts
        offsets, at = [], HEADER_WORDS
        for i, length in enumerate(self._lengths):
            if i % 3 == 0:
                offsets.append(at)
            at += length
        words = tf.gather(tf.bitcast(message, tf.float32), tf.constant(offsets, tf.int32))
        return tf.bitcast(words, tf.int32)

    def join(self, parts: Parts) -> tf.Tensor:
        """Join the parts that `split` returned."""
        counts = map_words(lambda c: tf.split(c, len(self.quantized), axis=-1), parts.counts)
        words = [parts.flags]
        for count, indices, value, one_mean in zip(
            counts, parts.indices, parts.values, self.quantized, strict=True
        ):
            values = tf.bitcast(value, tf.int32)
            words += [count, values, indices] if one_mean else [count, indices, values]
        return joined(*words, axis=-1)

    def message(
        self,
        finite: tf.Tensor,
        counts: tf.Tensor,
        indices: Sequence[tf.Tensor],
        values: Sequence[tf.Tensor],
    ) -> tf.Tensor:
        """Return one worker's message, int32 `[words]`; all zero if it is non-finite.

        Args:
            finite: Bool scalar.
            counts: See `Parts`.
            indices: See `Parts`.
            values: See `Parts`.
        """
        flags = tf.ones([HEADER_WORDS], tf.int32)
        return tf.where(finite, self.join(Parts(flags, counts, indices, values)), 0)

    # TensorFlow's protocol for dataclasses in nested structures. It lets a `tf.function` return a
    # `Selection`: tensors among the capacities are leaves, ints are not.
    def __tf_flatten__(self) -> tuple[Any, tuple[Any, ...]]:
        """Return the static values and the tensors."""
        if self.is_static:
            return (self.capacities, self.quantized), ()
        return (None, self.quantized), (self.capacities,)

    @classmethod
    def __tf_unflatten__(cls, metadata: Any, components: tuple[Any, ...]) -> MessageLayout:
        """Return the layout that `__tf_flatten__` flattened."""
        capacities, quantized = metadata
        return cls(components[0] if capacities is None else capacities, quantized)
