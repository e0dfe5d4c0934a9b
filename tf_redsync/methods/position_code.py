"""Positions of the elements that are sent, coded by the gaps between them.

The tensors of a bucket make one stream of gaps, in a message of a fixed length that is a little
above the average: what does not fit is not sent.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tf_redsync.exchange.layout import TensorSpec
from tf_redsync.ops.codecs import (
    Positions,
    golomb_decode,
    golomb_encode,
    golomb_parameter,
    golomb_words,
)

_SLACK = 1.005  # of the code's length over its average


@dataclasses.dataclass(frozen=True)
class PositionCode:
    """How positions are coded.

    Attributes:
        sizes: Elements of each tensor.
        k: Positions of each tensor.
        rice: b, bits of a gap that are sent as they are.
        words: Length of the code in the message.
    """

    sizes: tuple[int, ...]
    k: tuple[int, ...]
    rice: int
    words: int

    @classmethod
    def of(cls, specs: Sequence[TensorSpec], density: float) -> PositionCode:
        """Return the code for a fraction `density` of each tensor's elements, rounded up."""
        sizes = tuple(s.size for s in specs)
        k = tuple(min(max(1, math.ceil(density * n - 1e-9)), n) for n in sizes)
        share = min(max(sum(k), 1) / max(sum(sizes), 1), 1.0)
        rice = golomb_parameter(share)
        bits = rice + 1 / (1 - (1 - share) ** (2**rice))
        return cls(sizes, k, rice, math.ceil(_SLACK * bits * sum(k) / 32) + 2)

    @property
    def starts(self) -> list[int]:
        """Where each tensor starts in the flattened bucket."""
        return [0, *np.cumsum(self.sizes)[:-1].tolist()]

    def fit(
        self, positions: Sequence[tf.Tensor], counts: Sequence[tf.Tensor]
    ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        """Choose what fits into the message.

        Args:
            positions: Of each tensor, int32 `[k]`, ascending, in the flattened bucket.
            counts: Of each tensor, how many of them are used.

        Returns:
            All used positions as one vector, int32 `[sum of k]`; how many of them fit; and how many
            of each tensor.
        """
        parts = [at[:n] for at, n in zip(positions, counts, strict=True)]
        stream = tf.concat(parts, axis=0)
        gaps = stream - tf.concat([[-1], stream[:-1]], axis=0)
        length = 1 + self.rice + tf.bitwise.right_shift(gaps - 1, self.rice)
        fits = tf.cumsum(tf.cast(length, tf.int64)) <= 32 * self.words
        sent = tf.math.count_nonzero(fits, dtype=tf.int32)
        before = tf.cumsum(tf.stack(counts), exclusive=True)
        kept = tf.clip_by_value(sent - before, 0, tf.stack(counts))
        stream = tf.pad(stream, [[0, sum(self.k) - tf.size(stream)]])
        return tf.ensure_shape(stream, [sum(self.k)]), sent, tf.unstack(kept, num=len(counts))

    def encode(self, stream: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        """Code the first `count` positions: count, bits, code; int32 `[2 + words]`."""
        sizes = [sum(self.sizes)]
        coded = golomb_encode([stream], count[tf.newaxis], sizes=sizes, rice=[self.rice])
        padding = [[0, max(0, 2 + self.words - coded.shape[0])]]
        return tf.pad(coded, padding)[: 2 + self.words]

    def decode(self, messages: tf.Tensor) -> Positions:
        """Decode what `encode` returned on each worker, int32 `[workers, 2 + words]`."""
        sizes, slots, rice = [sum(self.sizes)], [sum(self.k)], [self.rice]
        full = golomb_words(sizes, slots, rice)
        code = tf.pad(messages, [[0, 0], [0, max(0, full - messages.shape[1])]])[:, :full]
        return golomb_decode(code, sizes=sizes, slots=slots, rice=rice)

    def tensor_of(self, positions: tf.Tensor) -> tf.Tensor:
        """Return for every position the number of its tensor, int32 of the same shape."""
        ends = np.cumsum(self.sizes, dtype=np.int32)
        number = tf.searchsorted(ends, tf.reshape(positions, [-1]), side="right")
        return tf.reshape(tf.minimum(number, len(self.sizes) - 1), tf.shape(positions))
