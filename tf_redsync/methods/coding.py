"""What quantisers share: who is served, the delivery of codes, norms."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from tf_redsync import checks
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.requests import AllGather, Request
from tf_redsync.methods.base import Method, State
from tf_redsync.methods.dense import Dense
from tf_redsync.methods.sparse import DENSE_BELOW, too_small
from tf_redsync.ops.quantization import dequantize_sum, quantize


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantizer(Method):
    """A method that sends a few bits of every element of the large tensors.

    Args:
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.
    """

    dense_below: int = DENSE_BELOW

    requests: ClassVar[str] = "all-gather of codes"

    def __post_init__(self) -> None:
        checks.integer("dense_below", self.dense_below, low=0)

    def refuses(self, spec: TensorSpec) -> str | None:
        """See `Method`."""
        return too_small(spec, self.dense_below)

    def dense(self) -> Method:
        """See `Method`."""
        return Dense()

    def init(self, layout: BucketLayout) -> State:
        """See `Method`. Zeros for every tensor, under each name of the state."""
        zeros = [tf.zeros(s.shape, tf.float32) for s in layout.specs]
        return {name: list(zeros) for name in self.state_kinds}


def deliver_codes(
    tensors: Sequence[tf.Tensor],
    scales: tf.Tensor,
    *,
    errors: bool = False,
    stream: tf.Tensor | None = None,
    **form: Any,
) -> Generator[Request, Any, tuple[list[tf.Tensor], list[tf.Tensor]]]:
    """All-gather the codes of tensors and add up what they stand for.

    Use it as `totals, errors = yield from deliver_codes(...)`.

    Args:
        tensors: Float32 tensors of any shape.
        scales: As `ops.quantize` wants them.
        errors: Whether what the codes leave out is wanted.
        stream: As `ops.quantize` wants it.
        form: `mode`, `levels` and `bucket_size`, as `ops.quantize` wants them.

    Returns:
        For every tensor the sum over workers; and this worker's errors, an empty list unless
        asked for.
    """
    coded = quantize(tensors, scales, errors=errors, stream=stream, **form)
    messages = yield AllGather(coded.message)
    return dequantize_sum(messages, tensors, **form), list(coded.errors)


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
