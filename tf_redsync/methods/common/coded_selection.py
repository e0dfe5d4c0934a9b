"""Exact top-k in a coded message, of large and small tensors alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any, ClassVar

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.codings.base import Capacity
from tf_redsync.codings.fused_topk import (
    VALUE_BITS,
    Selected,
    coding,
    select_and_code,
    uncoded,
)
from tf_redsync.exchange import wire
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.method import Payloads
from tf_redsync.exchange.requests import AllGather, Request
from tf_redsync.methods.common.sparsifier import Sparsifier, delivered, element_count, too_small
from tf_redsync.ops.message_layout import MessageLayout


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodedSelection(Sparsifier):
    """A sparsifier that sends the k largest elements as Golomb-coded positions and few-bit values.

    Biases and norms would cost more than everything else if they were all-reduced densely, as by
    other sparsifiers. In a code an element of them is no dearer than one of a matrix, so they
    travel in the same message, at a density of their own.

    Args:
        density: Fraction of a tensor's elements that is sent, in (0, 1].
        small_density: The same for small tensors: biases, norms, and those of fewer than
            `dense_below` bytes. No less than `density` in any case. `None` to all-reduce them
            densely.
        value_bits: Bits of a value: 1 for a sign, each further one, up to 4, for twice as many
            magnitudes; 16 for bfloat16.
        dense_below: Tensors of fewer float32 bytes are small.
    """

    value_bits: int = 1
    small_density: float | None = 0.1

    rounds_values: ClassVar[bool] = False  # they have codes of their own

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer("value_bits", self.value_bits, low=1)
        if self.value_bits not in VALUE_BITS:
            raise ValueError(
                f"`value_bits` must be one of {VALUE_BITS}; 16 is for bfloat16. Received: "
                f"value_bits={self.value_bits}"
            )
        if self.small_density is not None:
            checks.real("small_density", self.small_density, low=0.0, high=1.0, low_open=True)

    @property
    @override
    def notes(self) -> tuple[str, ...]:
        if self.density < 1.0 or self.value_bits == 16:
            return ()
        return (
            f"{type(self).__name__}(density=1.0) with value_bits={self.value_bits} is sign "
            "compression with error feedback, and not dense training: each element travels as its "
            f"sign and one of {2 ** (self.value_bits - 1)} magnitudes. Dense() is exact; "
            "value_bits=16 sends bfloat16",
        )

    @override
    def refuses(self, spec: TensorSpec) -> str | None:
        return super().refuses(spec) if self.small_density is None else None

    @override
    def k(self, spec: TensorSpec, density: float | None = None) -> int:
        """Number of elements of a tensor that are sent at a density (default: the method's)."""
        density = self.density if density is None else density
        if self.small_density is not None and too_small(spec, self.dense_below):
            density = max(density, self.small_density)
        return element_count(density, spec.size)

    @override
    def describe(self, spec: TensorSpec) -> str:
        return f"{self.k(spec)} elements, coded, {self.value_bits}-bit values"

    def message_payloads(self, layout: BucketLayout) -> Payloads:
        """Return the payload of `select_and_deliver`."""
        plain = MessageLayout.of(self.counts(layout))
        capacity = Capacity(tuple(s.size for s in layout.specs), plain.capacities)
        words = sum(coding(self.value_bits).lengths(capacity, plain))
        return [(AllGather, wire.BYTES_PER_WORD * words)]

    def select_and_deliver(
        self,
        grads: list[tf.Tensor],
        residuals: list[tf.Tensor],
        velocities: list[tf.Tensor],
        ctx: Context,
        **momentum: Any,
    ) -> Generator[Request, Any, tuple[list[Any], Selected]]:
        """Accumulate, select, all-gather the coded messages, add them up.

        Use it as `totals, selected = yield from self.select_and_deliver(...)`.

        Args:
            grads: Gradients.
            residuals: What waits.
            velocities: Of the momentum; empty without.
            ctx: The exchange's.
            **momentum: `momentum`, `nesterov` and `masking` of `ops.accumulate_and_select`.

        Returns:
            For every tensor the sum over workers, dense or a `SparseTotal`; and what is kept.
        """
        selected = select_and_code(
            grads,
            residuals,
            velocities,
            self.counts(ctx.layout),
            value_bits=self.value_bits,
            scale=ctx.scale,
            **momentum,
        )
        messages = yield AllGather(selected.message)
        like = selected.residuals
        messages = uncoded(messages, like, selected.layout, self.value_bits)
        return delivered(ctx.layout, messages, selected.layout, like), selected
