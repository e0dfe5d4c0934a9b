"""Base class of sparsifiers, their element counts, and the all-gather of selected elements."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Generator, Sequence
from fractions import Fraction
from typing import Any

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks, ops
from tf_redsync.codings.block_values import BlockValues
from tf_redsync.codings.message import MessageCoding
from tf_redsync.codings.plain import Half
from tf_redsync.exchange.context import BlockRounding, Context
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.method import Method, Payloads
from tf_redsync.exchange.requests import AllGather, Request
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.dense import Dense
from tf_redsync.ops import wire
from tf_redsync.ops.message_layout import MessageLayout
from tf_redsync.ops.selection import sparse_totals
from tf_redsync.ops.sparse import SparseTotal

# Minimum number of elements per message entry at which totals stay sparse (`sparse.descend`). At 2
# this takes 0.75 of the time of a dense total and a dense update, with one thread or two.
SPARSE_TOTAL_FACTOR = 2
DENSE_BELOW = 4096  # bytes; a sparse message saves nothing for smaller tensors


def element_count(density: float, size: int) -> int:
    """Return `density * size`, rounded, at least 1 and at most `size`."""
    return min(max(1, int(density * size + 0.5)), size)


def kept_elements(sparsity: float, size: int) -> int:
    """Return the number of elements kept by pruning: ceil((1 - sparsity) size), exactly.

    Example:
        >>> kept_elements(0.7, 10), kept_elements(0.29, 100), kept_elements(0.5, 3)
        (3, 71, 2)
    """
    return math.ceil((1 - Fraction(str(float(sparsity)))) * size)


def capacity(count: float, size: int) -> int:
    """Return the capacity of a message: `count`, rounded up, at most `size`."""
    return min(math.ceil(count), size)


def too_small(spec: TensorSpec, dense_below: int) -> str | None:
    """Return the reason to send a tensor densely, or `None`.

    Biases, norms and small tensors cost few bytes, and training is sensitive to their errors.
    """
    if spec.is_bias_or_norm:
        return f"rank {len(spec.shape)} (bias, norm)"
    if spec.bytes < dense_below:
        return f"{spec.bytes} bytes < dense_below"
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sparsifier(Method):
    """A method that sends a fraction of every large tensor and keeps the rest in a residual.

    Args:
        density: Fraction of the elements that is sent, in (0, 1].
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.
    """

    density: float = 0.01
    dense_below: int = DENSE_BELOW

    def __post_init__(self) -> None:
        checks.real("density", self.density, low=0.0, high=1.0, low_open=True)
        checks.integer("dense_below", self.dense_below, low=0)

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            state_kinds={"residual": "sum"},
            # `deliver` and `all_reduce` round all values
            rounds_values=True,
            waiting_steps=1.0 / self.density,
            sends_selected=True,
        )

    def k(self, spec: TensorSpec) -> int:
        """Return the number of elements to send of a tensor."""
        return element_count(self.density, spec.size)

    def capacities(self, layout: BucketLayout) -> list[int]:
        """Return `k` of each tensor of a bucket."""
        return list(map(self.k, layout.specs))

    @override
    def refuses(self, spec: TensorSpec) -> str | None:
        return too_small(spec, self.dense_below)

    @override
    def dense(self) -> Method:
        return Dense()


def deliver(
    ctx: Context,
    selection: ops.Selection,
) -> Generator[Request, Any, tuple[list[Any], list[tf.Tensor]]]:
    """All-gather selected elements and sum them over the workers.

    Use it as `totals, residuals = yield from deliver(...)`.

    Args:
        ctx: Context of the exchange, whose `coding` or `rounding` applies to the elements.
        selection: From `ops.accumulate_and_select`.

    Returns:
        For each tensor the sum over workers, dense or a `SparseTotal`; and the new residuals.
    """
    message, message_layout = selection.message, selection.layout
    residuals = list(selection.residuals)
    coding = message_coding(ctx)
    sent = functools.partial(message_layout.counts, message)
    if coding is not None:
        message, residuals = coding.encode(message, residuals, message_layout)
    messages = yield AllGather(message, sent)
    if coding is not None:
        messages, message_layout = coding.decode(messages, residuals, message_layout)
    return sum_messages(ctx.layout, messages, message_layout, residuals), residuals


def selected_payloads(message_layout: MessageLayout) -> Payloads:
    """Return the payload of `deliver` without a coding."""
    return [(AllGather, wire.BYTES_PER_WORD * message_layout.words)]


def message_coding(ctx: Context) -> MessageCoding | None:
    """Return the coding of selected elements in an exchange; `None` for plain words."""
    rounding = ctx.rounding
    if ctx.coding is not None or rounding is None:
        return ctx.coding
    if isinstance(rounding, BlockRounding):
        return MessageCoding(values=BlockValues(bits=rounding.bits, block=rounding.block))
    return MessageCoding(values=Half(dtype=rounding.dtype), error_feedback=rounding.error_feedback)


def sum_messages(
    layout: BucketLayout,
    messages: tf.Tensor,
    message_layout: MessageLayout,
    like: Sequence[tf.Tensor],
    sums: list[SparseTotal] | None = None,
) -> list[Any]:
    """Return the sums over workers of plain messages, dense or as a `SparseTotal`.

    Args:
        layout: Layout of the bucket. With `sparse_totals`, short totals stay sparse.
        messages: int32 `[workers, words]`.
        message_layout: Layout of the messages. Only a static layout can give sparse totals.
        like: Float32 tensors in the shapes of the totals. Pass residuals, since gradients may have
            another dtype and their memory can be freed.
        sums: The `sparse_totals` of the messages, if the caller has them.
    """
    if layout.sparse_totals and message_layout.is_static:
        size = sum([s.size for s in layout.specs])
        if SPARSE_TOTAL_FACTOR * layout.workers * sum(message_layout.capacities) <= size:
            return sums or sparse_totals(messages, message_layout)
    return ops.decode(messages, message_layout, like)


def propagate_nonfinite(values: list[tf.Tensor], sums: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return `values`, with a NaN in the first tensor if any element of `sums` is non-finite.

    Methods that all-reduce selected elements of `sums` have no flag in a message. With the NaN, all
    workers also skip the step for a non-finite element that is not selected. Finite `sums` leave
    the values unchanged.
    """
    zero = tf.where(wire.all_finite(sums), 0.0, float("nan"))
    first = next((i for i, v in enumerate(values) if v.shape.num_elements() != 0), None)
    return [v + zero if i == first else v for i, v in enumerate(values)]


def flat(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return the tensors flattened and concatenated to one vector."""
    return tf.concat([tf.reshape(t, [-1]) for t in tensors], axis=0)


def split(vector: tf.Tensor, specs: Sequence[TensorSpec]) -> list[tf.Tensor]:
    """Split a vector of `flat` into tensors of the shapes of `specs`."""
    parts = tf.split(vector, [s.size for s in specs])
    return [tf.reshape(p, s.shape) for p, s in zip(parts, specs, strict=True)]
