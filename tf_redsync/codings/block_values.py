"""Values as numbers of a few bits with a shared scale per block."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import tensorflow as tf
from typing_extensions import override

from tf_redsync.codings.base import CodedValues, ValueCoding, used
from tf_redsync.config import register
from tf_redsync.ops import wire
from tf_redsync.ops.block_quantization import (
    BLOCK_UNIT,
    block_dequantize,
    block_quantize,
    block_words,
    check_block_format,
)
from tf_redsync.ops.wire import map_words


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockValues(ValueCoding):
    """Numbers of a few bits with a shared scale per block; blocks span the values of all tensors.

    The code is the row of `ops.block_quantization`, without its flag. Positions ascend, so a block
    has the values of neighbours in a tensor. With 4 bits, numbers are floats (E2M1), else integers.

    Args:
        bits: 8, 4 or 2.
        block: Values that share a scale, a multiple of 32.

    Raises:
        ValueError: If an argument is out of range; the message names it.
    """

    bits: int = 8
    block: int = 256

    any_slots: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_block_format(self.bits, self.block)

    @override
    def words(self, slots: Sequence[Any]) -> Any:
        return block_words(_padded(slots), bits=self.bits, block=self.block) - wire.HEADER_WORDS

    @override
    def encode(
        self, values: Sequence[tf.Tensor], counts: tf.Tensor, stream: tf.Tensor
    ) -> CodedValues:
        vector = tf.concat(list(values), axis=0)
        size = tf.size(vector) if vector.shape[0] is None else vector.shape[0]
        row = tf.pad(vector, [[0, -size % BLOCK_UNIT]])[tf.newaxis]
        message, errors = block_quantize(row, bits=self.bits, block=self.block)
        flag, words = map_words(lambda m: tf.split(m[0], [wire.HEADER_WORDS, -1]), message)
        usable = wire.all_ones(flag)
        # NaNs make `MessageCoding` send an all-zero message, so all workers skip the step.
        sent = tf.where(usable, (row - errors)[0, :size], float("nan"))
        return CodedValues(words, tf.split(sent, [tf.size(v) for v in values], num=len(values)))

    @override
    def decode(self, words: tf.Tensor, counts: tf.Tensor, slots: Sequence[Any]) -> list[tf.Tensor]:
        messages = map_words(lambda w: tf.pad(w, [[0, 0], [wire.HEADER_WORDS, 0]]), words)
        size = tf.cast(_padded(slots), tf.int64)
        rows = block_dequantize(messages, size, bits=self.bits, block=self.block)
        parts = tf.split(rows[:, : sum(slots)], list(slots), axis=1, num=len(slots))
        return [used(part, counts[:, i : i + 1]) for i, part in enumerate(parts)]


def _padded(slots: Sequence[Any]) -> Any:
    return sum(slots) + -sum(slots) % BLOCK_UNIT
