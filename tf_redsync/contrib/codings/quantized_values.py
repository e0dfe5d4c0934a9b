"""QSGD of the selected values: stochastic rounding in buckets."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import tensorflow as tf
from typing_extensions import override

from tf_redsync.codings.base import CodedValues, ValueCoding, used
from tf_redsync.config import register
from tf_redsync.ops.quantization import bucketed, dequantize_sum, quantize
from tf_redsync.ops.quantized_format import check_bucket_size, check_levels, quantized_words
from tf_redsync.ops.wire import as_row, map_words

MODE = "stochastic"


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class QSGDValues(ValueCoding):
    """QSGD of the selected values: stochastic rounding in buckets with a norm each.

    The code is the message of `ops.quantize`.

    Alistarh, Grubic, Li, Tomioka, Vojnovic (2017), "QSGD", NeurIPS, arXiv 1610.02132, applied to
    the selected values only. Xu et al. (2021), "DeepReduce", NeurIPS, use it with 127 levels and
    buckets of 512.

    Args:
        levels: Number of non-zero magnitudes; a value takes `ceil(log2(2 levels + 1))` bits.
        bucket_size: Values that share a norm, which is their largest magnitude; a multiple of 32.

    Raises:
        ValueError: If an argument is out of range; the message names it.
    """

    levels: int = 127
    bucket_size: int = 512

    paper: ClassVar[str] = "Alistarh, Grubic, Li, Tomioka, Vojnovic 2017"

    def __post_init__(self) -> None:
        check_levels("levels", self.levels)
        check_bucket_size(self.bucket_size)

    @override
    def words(self, slots: Sequence[Any]) -> Any:
        return quantized_words(list(slots), MODE, self.levels, self.bucket_size)

    @override
    def encode(
        self, values: Sequence[tf.Tensor], counts: tf.Tensor, stream: tf.Tensor
    ) -> CodedValues:
        rows = [bucketed(tf.abs(v), v.shape[0], self.bucket_size) for v in values]
        scales = [tf.reduce_max(r, axis=1) for r in rows]
        words = quantize(
            values, tf.concat(scales, axis=0), mode=MODE, levels=self.levels,
            bucket_size=self.bucket_size, stream=stream,
        ).message  # fmt: skip
        sent = self.decode(as_row(words), counts[tf.newaxis], [v.shape[0] for v in values])
        return CodedValues(words, [tensor[0] for tensor in sent])

    @override
    def decode(self, words: tf.Tensor, counts: tf.Tensor, slots: Sequence[Any]) -> list[tf.Tensor]:
        like = [tf.zeros([k]) for k in slots]

        def of_worker(row: tf.Tensor) -> list[tf.Tensor]:
            return dequantize_sum(
                row, like, mode=MODE, levels=self.levels, bucket_size=self.bucket_size
            )

        by_worker = [map_words(lambda w, r=r: w[r : r + 1], words) for r in range(words.shape[0])]
        rows = [[value[tf.newaxis] for value in of_worker(row)] for row in by_worker]
        # Not `tf.stack`: if graph optimisation finds equal rows, such as zeros, it repeats the
        # first tensor instead of the others.
        values = [tf.concat(tensor, axis=0) for tensor in zip(*rows, strict=True)]
        return [used(v, counts[:, i : i + 1]) for i, v in enumerate(values)]
