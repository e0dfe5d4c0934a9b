"""What sparsifiers share: how many elements to send, which tensors are too small, the delivery."""

from __future__ import annotations

import dataclasses
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
from tf_redsync.ops.selection import coordinates

SPARSE_TOTAL_FACTOR = (
    16  # touching single elements costs about as much as streaming over a cache line
)
DENSE_BELOW = 4096  # bytes; below, indices and a place in the message cost more than they save


def element_count(density: float, size: int) -> int:
    """Number of elements to send: `density * size`, rounded, at least 1 and at most `size`."""
    return min(max(1, int(density * size + 0.5)), size)


def kept_elements(sparsity: float, size: int) -> int:
    """Number of elements that are kept of `size`: ceil((1 - sparsity) size), in exact decimals.

    Example:
        >>> kept_elements(0.7, 10), kept_elements(0.29, 100), kept_elements(0.5, 3)
        (3, 71, 2)
    """
    return math.ceil((1 - Fraction(str(float(sparsity)))) * size)


def capacity(count: float, size: int) -> int:
    """Elements that a message has room for: `count`, rounded up, at most all of the tensor's."""
    return min(math.ceil(count), size)


def too_small(spec: TensorSpec, dense_below: int) -> str | None:
    """Return why a tensor is better sent densely, or `None`.

    Biases and norms are few, sensitive and cheap; and so is every small tensor.
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
            # All values go through `deliver` or `all_reduce`
            rounds_values=True,
            waiting_steps=1.0 / self.density,
            sends_selected=True,
        )

    def k(self, spec: TensorSpec) -> int:
        """Return how many elements of a tensor are sent."""
        return element_count(self.density, spec.size)

    def counts(self, layout: BucketLayout) -> list[int]:
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
    """All-gather selected elements and add them up.

    Use it as `totals, residuals = yield from deliver(...)`.

    Args:
        ctx: The exchange's. Its `coding` or `rounding` says how elements travel.
        selection: From `ops.accumulate_and_select`. If its layout is static, short totals stay
            coordinates where the receiver takes these.

    Returns:
        For every tensor the sum over workers, dense or a `SparseTotal`; and the new residuals.
    """
    message, residuals, plain = selection.message, list(selection.residuals), selection.layout
    coding = ctx.coding if ctx.rounding is None else message_coding(ctx)
    sent = plain.counts(message)
    if coding is not None:
        message, residuals = coding.encode(message, residuals, plain)
    messages = yield AllGather(message, sent)
    if coding is not None:
        messages, plain = coding.decode(messages, residuals, plain)
    return sum_messages(ctx.layout, messages, plain, residuals), residuals


def selected_payloads(plain: MessageLayout) -> Payloads:
    """Return the payload of `deliver` without a coding, for messages of a layout."""
    return [(AllGather, wire.BYTES_PER_WORD * plain.words)]


def message_coding(ctx: Context) -> MessageCoding | None:
    """Return how selected elements travel in an exchange, `None` for as they are."""
    rounding = ctx.rounding
    if ctx.coding is not None or rounding is None:
        return ctx.coding
    if isinstance(rounding, BlockRounding):
        return MessageCoding(values=BlockValues(bits=rounding.bits, block=rounding.block))
    half = Half(dtype=rounding.dtype)
    return MessageCoding(values=half, error_feedback=rounding.error_feedback)


def sum_messages(
    layout: BucketLayout, messages: tf.Tensor, plain: MessageLayout, like: Sequence[tf.Tensor]
) -> list[Any]:
    """Add up the messages of all workers.

    Args:
        layout: The bucket.
        messages: int32 `[workers, words]`.
        plain: Their layout. If it is static, short totals stay coordinates where the receiver takes
            these.
        like: Float32 tensors of the shapes of the totals. Residuals, best: gradients are done with,
            and may be in another dtype.
    """
    if layout.sparse_totals and plain.is_static:
        size = sum([s.size for s in layout.specs])
        if SPARSE_TOTAL_FACTOR * layout.workers * sum(plain.capacities) <= size:
            return coordinates(messages, plain)
    return ops.decode(messages, plain, like)


def propagate_nonfinite(values: list[tf.Tensor], sums: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return `values` to all-reduce, with a NaN among them if anything in `sums` is not finite.

    For methods that send a part of `sums` without a message's flag: a bad element that is not sent
    has to stop the step on all workers too. Adds nothing otherwise, in no other element.
    """
    zero = 0.0 * tf.add_n([tf.reduce_sum(s) for s in sums])
    first = next((i for i, v in enumerate(values) if v.shape.num_elements() != 0), None)
    return [v + zero if i == first else v for i, v in enumerate(values)]


def flat(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return all elements of `tensors` as one vector."""
    return tf.concat([tf.reshape(t, [-1]) for t in tensors], axis=0)


def split(vector: tf.Tensor, specs: Sequence[TensorSpec]) -> list[tf.Tensor]:
    """Undo `flat`."""
    parts = tf.split(vector, [s.size for s in specs])
    return [tf.reshape(p, s.shape) for p, s in zip(parts, specs, strict=True)]
