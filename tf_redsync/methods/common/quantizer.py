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
from tf_redsync.exchange.requests import AllGather, AllReduce, Request
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.integer_sums import packed_digits, unpacked_digits
from tf_redsync.methods.common.random_numbers import stream
from tf_redsync.methods.common.sparsifier import DENSE_BELOW, flat, too_small
from tf_redsync.methods.dense import Dense
from tf_redsync.ops import wire
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

    def own_stream(self, ctx: Context) -> tf.Tensor:
        """Return this worker's stream for `ops.quantize`, int32 `[3]`; see `own_stream`."""
        return own_stream(self.seed, ctx)


def own_stream(seed: int, ctx: Context) -> tf.Tensor:
    """Return this worker's stream for `ops.quantize`, int32 `[3]`.

    A function of the seed, the step, the rank and the position of the bucket's first tensor.
    """
    word, number = tf.unstack(stream(seed, ctx.step, ctx.layout.specs[0].position))
    return tf.stack([word, tf.cast(ctx.rank, tf.int32), number])


def deliver_codes(
    tensors: Sequence[tf.Tensor],
    scales: tf.Tensor,
    *,
    mode: str,
    levels: int = 1,
    bucket_size: int | None = None,
    errors: bool = False,
    own_stream: tf.Tensor | None = None,
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
        own_stream: As `ops.quantize` wants its `stream`.

    Returns:
        For every tensor the sum over workers; and this worker's errors, an empty list unless
        asked for.
    """
    coded = quantize(
        tensors, scales, mode=mode, levels=levels, bucket_size=bucket_size, errors=errors,
        stream=own_stream,
    )  # fmt: skip
    messages = yield AllGather(coded.message)
    totals = dequantize_sum(messages, tensors, mode=mode, levels=levels, bucket_size=bucket_size)
    return totals, list(coded.errors)


def deliver_ternary(
    tensors: Sequence[tf.Tensor], scalers: tf.Tensor, own_stream: tf.Tensor, workers: int
) -> Generator[Request, Any, list[tf.Tensor]]:
    """All-reduce codes -1, 0 and 1 of one unit a tensor: the largest scaler of all workers.

    Use it as `totals = yield from deliver_ternary(...)`.

    Args:
        tensors: Float32 tensors of any shape. What is larger than its scaler is clipped.
        scalers: This worker's, float32, one for each tensor.
        own_stream: As `ops.quantize` wants its `stream`.
        workers: Number of workers.

    Returns:
        For every tensor the sum over workers.
    """
    messages = yield AllGather(wire.message(wire.all_finite(tensors), scalers))
    shared = tf.reduce_max(wire.split(messages, len(tensors))[1], axis=0)
    clipped = [
        tf.clip_by_value(t, -c, c) for t, c in zip(tensors, tf.unstack(scalers), strict=True)
    ]
    coded = quantize(clipped, shared, stream=own_stream, mode="stochastic")
    own = dequantize_sum(coded.message[tf.newaxis], tensors, mode="stochastic")
    codes = flat([tf.sign(t) for t in own])
    (sums,) = yield AllReduce([packed_digits(codes, workers)])
    integers = tf.split(
        unpacked_digits(sums, codes.shape[0], workers), [t.shape.num_elements() for t in tensors]
    )
    return [
        c * tf.reshape(n, t.shape)
        for c, n, t in zip(tf.unstack(shared), integers, tensors, strict=True)
    ]


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
