"""Run-length codes of a bitmap, in fields of equal width."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import tensorflow as tf
from typing_extensions import override

from tf_redsync.codings.base import Capacity, CodedPositions, IndexCoding
from tf_redsync.codings.streams import Stream, gaps
from tf_redsync.config import register
from tf_redsync.ops import bits
from tf_redsync.ops.codecs import Positions
from tf_redsync.ops.wire import leading


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class RunLength(IndexCoding):
    """Run-length codes of a bitmap, in fields of equal width.

    One stream per bucket: `[count] [fields]`.

    Solomon W. Golomb (1966), "Run-length encodings", IEEE Transactions on Information Theory 12.
    For sparse gradients: Xu et al. (2021), "DeepReduce", NeurIPS.

    A field of r bits with v < 2^r - 1 codes v zeros and a one; v = 2^r - 1 codes v zeros without a
    one. k ones among n bits take at most k + n / (2^r - 1) fields; r minimizes the length.
    """

    paper: ClassVar[str] = "Golomb 1966"

    @override
    def words(self, capacity: Capacity) -> Any:
        fields, width = _best(Stream(capacity))
        return 1 + bits.packed_words(fields, width)

    @override
    def encode(
        self, indices: Sequence[tf.Tensor], counts: tf.Tensor, capacity: Capacity, seed: tf.Tensor
    ) -> CodedPositions:
        stream, (fields, width) = Stream(capacity), _best(Stream(capacity))
        at, count, longest = stream.merged(indices, counts), tf.reduce_sum(counts), 2**width - 1
        zeros = gaps(at) - 1
        valid = leading(count, stream.slots)
        runs = tf.where(valid, zeros // longest + 1, 0)  # fields of each position
        last = tf.where(valid, tf.cumsum(runs) - 1, fields)
        codes = tf.fill([fields + 1], longest)
        codes = tf.tensor_scatter_nd_update(codes, last[:, tf.newaxis], zeros % longest)[:fields]
        code = tf.concat([count[tf.newaxis], bits.packed(codes, width)], axis=0)
        return CodedPositions(code, list(indices), counts)

    @override
    def decode(self, words: tf.Tensor, capacity: Capacity, seed: tf.Tensor) -> Positions:
        stream, (fields, width) = Stream(capacity), _best(Stream(capacity))
        count, longest = words[:, :1], 2**width - 1
        codes = bits.unpacked(words[:, 1:], width, fields)
        is_last = tf.cast(codes < longest, tf.int32)
        ends = tf.cumsum(tf.cast(codes + is_last, tf.int64), axis=1) - 1
        place, ones = bits.set_bits(bits.packed(is_last, 1), stream.slots)
        at = tf.gather(ends, place, batch_dims=1)
        # A message of zeros has a one in every field, and a count of 0.
        at = stream.checked(at, count, tf.minimum(ones, count))
        return stream.separated(at, count)


def _best(stream: Stream) -> tuple[int, int]:
    """Return the maximum number of fields and their width in bits, for the shortest code."""
    choices = []
    for width in range(1, 31):
        fields = stream.slots + stream.size // (2**width - 1)
        choices.append((fields * width, fields, width))
    return min(choices)[1:]
