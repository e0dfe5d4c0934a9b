"""Golomb codes of the gaps between positions: 0.7 % above the entropy of random positions.

Solomon W. Golomb (1966), "Run-length encodings", IEEE Transactions on Information Theory 12; for
gradients: Sattler, Wiedemann, Müller, Samek (2019), "Sparse Binary Compression", IJCNN, arXiv
1805.08768.

Positions of a fraction p are about geometrically spaced. With b = 1 + floor(log2(ln(phi - 1) /
ln(1 - p))), phi the golden ratio, a gap d is coded as (d - 1) >> b ones, a zero and the b low bits
of d - 1: b + 1 / (1 - (1 - p)^(2^b)) bits on average.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import tensorflow as tf

from tf_redsync.codings.base import CodedPositions, IndexCoding, Room, used
from tf_redsync.codings.streams import Stream, gaps
from tf_redsync.config import register
from tf_redsync.ops.codecs import (
    Positions,
    golomb_decode,
    golomb_encode,
    golomb_parameter,
    golomb_words,
)

SLACK = 1.005  # of a code's length over its average


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Golomb(IndexCoding):
    """Golomb codes of one stream of gaps for a bucket: `[count, bits, code]`.

    The code has the length of an average one and half a percent more. Positions that do not fit,
    those of the bucket's last tensors, are not sent.
    """

    sends_all: ClassVar[bool] = False
    paper: ClassVar[str] = "Golomb 1966"

    def parameters(self, room: Room) -> tuple[int, int]:
        """Return the bits of a gap that are sent as they are, and the words of the code."""
        stream = Stream(room)
        rice = golomb_parameter(stream.share)
        bits = rice + 1 / (1 - (1 - stream.share) ** (2**rice))
        return rice, math.ceil(SLACK * bits * stream.slots / 32) + 2

    def words(self, room: Room) -> Any:
        """See `IndexCoding`."""
        return 2 + self.parameters(room)[1]

    def encode(
        self, indices: Sequence[tf.Tensor], counts: tf.Tensor, room: Room, seed: tf.Tensor
    ) -> CodedPositions:
        """See `IndexCoding`."""
        stream, (rice, words) = Stream(room), self.parameters(room)
        at = stream.merged(indices, counts)
        lengths = 1 + rice + tf.bitwise.right_shift(gaps(at) - 1, rice)
        lengths = used(lengths, tf.reduce_sum(counts))
        fits = tf.cumsum(tf.cast(lengths, tf.int64)) <= 32 * words
        sent = tf.minimum(tf.math.count_nonzero(fits, dtype=tf.int32), tf.reduce_sum(counts))
        code = golomb_encode([at], sent[tf.newaxis], sizes=[stream.size], rice=[rice])
        code = tf.pad(code, [[0, max(0, 2 + words - code.shape[0])]])[: 2 + words]
        return stream.cut(code, indices, counts, sent)

    def decode(self, words: tf.Tensor, room: Room, seed: tf.Tensor) -> Positions:
        """See `IndexCoding`."""
        stream, (rice, _) = Stream(room), self.parameters(room)
        form = {"sizes": [stream.size], "slots": [stream.slots], "rice": [rice]}
        full = golomb_words(**form)
        code = tf.pad(words, [[0, 0], [0, max(0, full - words.shape[1])]])[:, :full]
        (at,), count = golomb_decode(code, **form)
        return stream.separated(at, count)
