"""What quantisers share: who is served, the delivery of codes, blocks that one worker adds up."""

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
