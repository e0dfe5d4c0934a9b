"""What quantisers share: who is served, the delivery of codes, norms."""

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
    """A quantiser that rounds at random, right on average: it keeps nothing.

    Args:
        seed: Of the random numbers; the same on all workers, who draw different ones even so.
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
            # Right on average only
            conserves=False,
        )

    def worker_stream(self, ctx: Context) -> tf.Tensor:
        """Return this worker's stream for `ops.quantize`, int32 `[3]`."""
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
    """All-gather the codes of tensors and add up what they stand for.

    Use it as `totals, errors = yield from deliver_codes(...)`.

    Args:
        tensors: Float32 tensors of any shape.
        scales: As `ops.quantize` wants them.
        mode: See there.
        levels: See there.
        bucket_size: See there.
        errors: Whether what the codes leave out is wanted.
        stream: See there.

    Returns:
        For every tensor the sum over workers; and this worker's errors, an empty list unless
        asked for.
    """
    coded = quantize(
        tensors, scales, mode=mode, levels=levels, bucket_size=bucket_size, errors=errors,
        stream=stream,
    )  # fmt: skip
    messages = yield AllGather(coded.message)
    totals = dequantize_sum(messages, tensors, mode=mode, levels=levels, bucket_size=bucket_size)
    return totals, list(coded.errors)


def largest(rows: tf.Tensor) -> tf.Tensor:
    """Largest magnitude of each row, 0 of an empty one."""
    return tf.maximum(tf.reduce_max(tf.abs(rows), axis=1), 0.0)


def l2_norm(rows: tf.Tensor) -> tf.Tensor:
    """Euclidean norm of each row, without overflow or underflow of the squares."""
    unit = largest(rows)
    shares = tf.math.divide_no_nan(rows, unit[:, tf.newaxis])
    return unit * tf.sqrt(tf.reduce_sum(tf.square(shares), axis=1))


def rms(rows: tf.Tensor, size: int) -> tf.Tensor:
    """Root mean square of each row of `size` elements."""
    return l2_norm(rows) / max(size, 1) ** 0.5
