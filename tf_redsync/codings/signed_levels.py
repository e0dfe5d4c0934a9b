"""Values as a sign and one of a few magnitudes, which are conditional means."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.codings.base import CodedValues, ValueCoding, used
from tf_redsync.config import register
from tf_redsync.ops import wire
from tf_redsync.ops.bits import packed, packed_words, unpacked
from tf_redsync.ops.wire import leading

MAX_BITS = 4


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class SignedLevels(ValueCoding):
    """Values as a sign and one of a few magnitudes, which are conditional means.

    The message is `[levels of each tensor, codes of all]`.

    Felix Sattler, Simon Wiedemann, Klaus-Robert Müller, Wojciech Samek (2020), "Robust and
    Communication-Efficient Federated Learning from Non-IID Data", IEEE TNNLS, arXiv 1903.02891,
    send the signs of the selected elements and their mean magnitude. This coding can also split the
    magnitudes of a tensor at their mean, each half at its own mean, and so on:

        C_1 = {all selected},    m_c = mean of |v| over C_c
        C_2c = {v in C_c: |v| <= m_c},    C_2c+1 = {v in C_c: |v| > m_c}
        code of v = [c - 2^(b - 1), v < 0],    value = +-m_c        2^(b - 1) <= c < 2^b

    with b bits per value. Magnitudes above a threshold are about exponentially distributed: most
    are just above it, a few far beyond. With one or two magnitudes, means have a much smaller error
    than linear or logarithmic steps between the extremes. With eight, logarithmic steps would be
    better for heavy tails, but more bits per value are rarely worth their bytes; see
    `rs.CodedTopK`.

    Means are computed from integers: magnitudes in units of 2^-31 of the power of two above the
    largest one, rounded down. Integer sums have the same bits in any order, on every device.

    Args:
        bits: Bits per value, 1 to 4: a sign and one of `2^(bits - 1)` magnitudes. Each magnitude
            takes 32 bits per tensor.

    Raises:
        ValueError: If an argument is out of range; the message names it.

    Example:
        >>> SignedLevels(bits=2).words([100, 60])  # 2 x 2 levels, 320 bits
        14
    """

    bits: int = 1

    paper: ClassVar[str] = "Sattler, Wiedemann, Müller, Samek 2020"

    def __post_init__(self) -> None:
        checks.integer("bits", self.bits, low=1)
        if self.bits > MAX_BITS:
            raise ValueError(
                f"`bits` must be in [1, {MAX_BITS}], since magnitudes are sent as floats. "
                f"Received: bits={self.bits}. Use `Half` for 16 bits per value."
            )

    @property
    def levels(self) -> int:
        """Number of magnitudes of each tensor."""
        return 1 << (self.bits - 1)

    @override
    def words(self, slots: Sequence[Any]) -> Any:
        return len(slots) * self.levels + packed_words(sum(slots), self.bits)

    @override
    def encode(
        self, values: Sequence[tf.Tensor], counts: tf.Tensor, stream: tf.Tensor
    ) -> CodedValues:
        levels, codes, sent = [], [], []
        for tensor, count in zip(values, tf.unstack(counts), strict=True):
            means, cells = conditional_means(tensor, count, self.bits - 1)
            negative = tensor < 0
            magnitudes = tf.gather(means, cells)
            levels.append(means)
            codes.append(used(2 * cells + tf.cast(negative, tf.int32), count))
            sent.append(used(tf.where(negative, -magnitudes, magnitudes), count))
        words = [wire.to_words(tf.concat(levels, 0)), packed(tf.concat(codes, 0), self.bits)]
        return CodedValues(tf.concat(words, axis=0), sent)

    @override
    def decode(self, words: tf.Tensor, counts: tf.Tensor, slots: Sequence[Any]) -> list[tf.Tensor]:
        heads = len(slots) * self.levels
        levels = tf.reshape(wire.from_words(words[:, :heads]), [-1, len(slots), self.levels])
        codes = tf.split(unpacked(words[:, heads:], self.bits, sum(slots)), list(slots), axis=1)
        values = []
        for i, of_tensor in enumerate(codes):
            magnitudes = tf.gather(levels[:, i], of_tensor // 2, batch_dims=1)
            signed = tf.where(tf.equal(of_tensor % 2, 1), -magnitudes, magnitudes)
            values.append(used(signed, counts[:, i : i + 1]))
        return values


def conditional_means(
    values: tf.Tensor, count: tf.Tensor, depth: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Split magnitudes at their mean, and each half again, `depth` times.

    Args:
        values: float32 `[slots]`, finite, 0 after the first `count`.
        count: int32 scalar.
        depth: In [0, 3].

    Returns:
        float32 `[2^depth]`, the means of the magnitudes in the final sets, 0 for an empty set; and
        int32 `[slots]`, the set of each value.
    """
    magnitudes = tf.abs(values)
    bits = tf.bitcast(magnitudes, tf.int32)
    largest = tf.reduce_max(tf.concat([bits, [0]], axis=0))
    shift = 157 - tf.cast(tf.bitwise.right_shift(largest, 23), tf.int64)
    integers = tf.cast(tf.cast(magnitudes, tf.float64) * _power_of_two(shift), tf.int64)
    valid = leading(count, tf.shape(values)[0])
    sets = tf.zeros_like(bits)
    for level in range(depth):
        means = _means(integers, sets, valid, 2**level, shift)
        sets = 2 * sets + tf.cast(magnitudes > tf.gather(means, sets), tf.int32)
    return _means(integers, sets, valid, 2**depth, shift), sets


def _means(
    integers: tf.Tensor, sets: tf.Tensor, valid: tf.Tensor, number: int, shift: tf.Tensor
) -> tf.Tensor:
    """Return the means of the first `number` sets, float32; see `conditional_means`."""
    inside = tf.equal(sets[:, tf.newaxis], tf.range(number)) & valid[:, tf.newaxis]
    members = tf.reduce_sum(tf.cast(inside, tf.int64), axis=0)
    totals = tf.reduce_sum(tf.where(inside, integers[:, tf.newaxis], 0), axis=0)
    means = tf.cast(totals, tf.float64) / tf.cast(tf.maximum(members, 1), tf.float64)
    return tf.cast(means * _power_of_two(-shift), tf.float32)


def _power_of_two(exponent: tf.Tensor) -> tf.Tensor:
    """Return 2^exponent as float64, for an int64 scalar."""
    return tf.bitcast(tf.bitwise.left_shift(exponent + 1023, tf.constant(52, tf.int64)), tf.float64)
