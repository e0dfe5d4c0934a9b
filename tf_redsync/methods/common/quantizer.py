"""Base classes of quantizers, the all-gather of their codes, and norms."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from typing import Any

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import TensorSpec
from tf_redsync.exchange.method import Method
from tf_redsync.exchange.requests import AllGather, Request
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.random_numbers import worker_stream
from tf_redsync.methods.common.sparsifier import DENSE_BELOW, too_small
from tf_redsync.methods.dense import Dense
from tf_redsync.ops.quantization import dequantize_sum, quantize


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantizer(Method):
    """A method that sends a few bits of every element of the large tensors.

    Args:
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.
    """

    dense_below: int = DENSE_BELOW

    def __post_init__(self) -> None:
        checks.integer("dense_below", self.dense_below, low=0)

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(super().traits, requests="all-gather of codes")

    @override
    def refuses(self, spec: TensorSpec) -> str | None:
        return too_small(spec, self.dense_below)

    @override
    def dense(self) -> Method:
        return Dense()


@dataclasses.dataclass(frozen=True, kw_only=True)
class StochasticQuantizer(Quantizer):
    """An unbiased quantizer: it rounds stochastically and has no residual.

    Args:
        seed: Seed of the rounding, equal on all workers. Their random streams differ by rank.
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.
    """

    seed: int = 0

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer("seed", self.seed, low=0)

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            # In expectation only
            conserves=False,
        )

    def worker_stream(self, ctx: Context) -> tf.Tensor:
        """Return this worker's random stream for `ops.quantize`, int32 `[3]`."""
        return worker_stream(self.seed, ctx)


def deliver_codes(
    tensors: Sequence[tf.Tensor],
    scales: tf.Tensor,
    *,
    mode: str,
    levels: int = 1,
    bucket_size: int | None = None,
    errors: bool = False,
    stream: tf.Tensor | None = None,
) -> Generator[Request, Any, tuple[list[tf.Tensor], list[tf.Tensor]]]:
    """All-gather quantized tensors and sum them over the workers.

    Use it as `totals, errors = yield from deliver_codes(...)`.

    Args:
        tensors: Float32 tensors of any shape.
        scales: As in `ops.quantize`.
        mode: As in `ops.quantize`.
        levels: As in `ops.quantize`.
        bucket_size: As in `ops.quantize`.
        errors: Whether to return the quantization errors.
        stream: As in `ops.quantize`.

    Returns:
        For each tensor the sum over workers; and this worker's quantization errors, an empty list
        unless `errors`.
    """
    coded = quantize(
        tensors, scales, mode=mode, levels=levels, bucket_size=bucket_size, errors=errors,
        stream=stream,
    )  # fmt: skip
    messages = yield AllGather(coded.message)
    totals = dequantize_sum(messages, tensors, mode=mode, levels=levels, bucket_size=bucket_size)
    return totals, list(coded.errors)


def largest(rows: tf.Tensor) -> tf.Tensor:
    """Return the largest magnitude of each row; 0 for an empty row."""
    return tf.maximum(tf.reduce_max(tf.abs(rows), axis=1), 0.0)


def l2_norm(rows: tf.Tensor) -> tf.Tensor:
    """Return the Euclidean norm of each row, without overflow or underflow of the squares."""
    unit = largest(rows)
    scaled = tf.math.divide_no_nan(rows, unit[:, tf.newaxis])
    return unit * tf.sqrt(tf.reduce_sum(tf.square(scaled), axis=1))


def rms(rows: tf.Tensor, size: int) -> tf.Tensor:
    """Return the root mean square of each row of `size` elements."""
    return l2_norm(rows) / max(size, 1) ** 0.5
