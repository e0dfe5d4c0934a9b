"""Sums of values that travel in 16 bits."""

from __future__ import annotations

import dataclasses

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.codings.plain import HALVES
from tf_redsync.config import register
from tf_redsync.exchange import feedback
from tf_redsync.exchange.context import Context, Rounding
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.method import (
    Exchange,
    Method,
    Payloads,
    State,
)
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.rounded_all_reduce import all_reduced, rounded_payloads
from tf_redsync.methods.common.wrapper import MethodWrapper
from tf_redsync.methods.local_sgd import LocalSGD


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class HalfPrecision(MethodWrapper):
    """16-bit numbers on the wire, for dense gradients or for the values that another method sends.

    The cheapest compression there is, and the one that every other has to beat. On every worker,
    with gradient g, residual e, and H(x) the 16-bit number next to x:

        p = g + e
        total = the sum over workers of H(p), in float32, rounded by H once more
        e <- p - what the total has of it

    Selected elements of a sparsifier are gathered as H(p), two in a word, and p - H(p) goes back
    into the residual: 48 bits an element rather than 64 (`codings/`).

    Formats. float16 has 11 significant bits between 6e-5 and 65504, bfloat16 has 8 and float32's
    range. What is too small for float16 waits in the residual. What is too large, or has too large
    a sum, is not finite: all workers skip the step, and `exchange.skipped` counts it. Gradients
    come divided by the number of workers, so that their sums hardly grow with it.

    Without error feedback the 16-bit numbers are all-reduced as they are, the usual practice: every
    partial sum is rounded, what is too small is lost, and there is no residual to store.

    Args:
        method: Whose values: `None` for the dense gradients, else a method that sends values, such
            as `RedSync`, `TopK`, `RandomBlock` or `PowerSGD`. It keeps the rounding errors in its
            residual. Methods that send signs or codes have no values to round.
        dtype: `"float16"` or `"bfloat16"`.
        error_feedback: Whether rounding errors are kept and sent later.

    Raises:
        ValueError: for an unknown dtype, or a method whose values cannot be rounded on the way.

    Example:
        >>> import tf_redsync as rs
        >>> rs.HalfPrecision(method=rs.RandomBlock(density=0.1), dtype="bfloat16").traits.conserves
        True
    """

    dtype: str = "float16"
    error_feedback: bool = True

    def __post_init__(self) -> None:
        checks.choice("dtype", self.dtype, HALVES)
        checks.boolean("error_feedback", self.error_feedback)
        sums = self._sums
        if not (sums is None or (isinstance(sums, Method) and sums.traits.rounds_values)):
            raise ValueError(
                "`method` must be None for the dense gradients, or a method that sends values, "
                "such as RedSync, DGC, TopK, MSTopK, SIDCo, GMC, FixedThreshold, SparDL, "
                "RandomK, RandomBlock, PowerSGD, ACPSGD or LocalSGD: what others send are no "
                "numbers to round, and Coded rounds by itself, with values=codings.Half(). "
                f"Received: method={self.method!r}"
            )

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="-",
            requests="all-to-all, then all-gather, of values; or as the method",
            bits="16 (1 + 1 / K)",
            state_kinds=self._state_kinds,
            conserves=self.error_feedback and (self.method is None or self.method.traits.conserves),
            # Dense totals are numbers that were received
            totals_may_overflow=self._sums is not None and self._sums.traits.totals_may_overflow,
        )

    @property
    def _state_kinds(self) -> dict[str, str]:
        if self._sums is not None:
            return self._sums.traits.state_kinds
        return {"residual": "sum"} if self.error_feedback else {}

    @property
    def _sums(self) -> Method | None:
        """The method that adds up; `None` if this does, all of its input."""
        method = self.method
        dense = isinstance(method, LocalSGD) and type(method).exchange is LocalSGD.exchange
        return None if dense else method

    @override
    def dense(self) -> Method:
        """Tensors that the method refuses are small: they travel in float32."""
        return self if self._sums is None else self._sums.dense()

    @override
    def describe(self, spec: TensorSpec) -> str:
        return (self.method.describe(spec) if self.method else "sum") + f" in {self.dtype}"

    @override
    def init(self, layout: BucketLayout) -> State:
        return Method.init(self, layout) if self._sums is None else self._sums.init(layout)

    @override
    def payloads(self, layout: BucketLayout, step: int) -> Payloads | None:
        if self._sums is not None:
            return None
        elements = sum(s.size for s in layout.specs)
        return rounded_payloads(self._rounding, elements, layout.workers)

    @property
    def _rounding(self) -> Rounding:
        return Rounding(self.dtype, self.error_feedback)

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        ctx = dataclasses.replace(ctx, rounding=self._rounding)
        if self._sums is not None:
            return (yield from self._sums.exchange(grads, state, ctx))
        values = feedback.scaled(grads, ctx.scale)
        if self.error_feedback:
            values = [e + g for e, g in zip(state["residual"], values, strict=True)]
        totals, errors = yield from all_reduced(ctx, values)
        return totals, {"residual": errors} if self.error_feedback else {}
