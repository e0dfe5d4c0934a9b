"""HalfPrecision: sums of 16-bit values, with error feedback."""

from __future__ import annotations

import dataclasses

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.codings.plain import HALVES
from tf_redsync.config import register
from tf_redsync.exchange import feedback
from tf_redsync.exchange.context import BlockRounding, Context, Rounding
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.method import Exchange, Method, Payloads, State
from tf_redsync.exchange.requests import AllReduce
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.rounded_all_reduce import all_reduce, rounded_payloads
from tf_redsync.methods.common.wrapper import MethodWrapper
from tf_redsync.methods.dense import Dense
from tf_redsync.methods.local_sgd import LocalSGD


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundingWrapper(MethodWrapper):
    """A wrapper that rounds the values of sums, and keeps the errors in a residual.

    Subclasses define `rounding` and `name`.
    """

    def __post_init__(self) -> None:
        method = self.delegate
        if not (method is None or (isinstance(method, Method) and method.traits.rounds_values)):
            raise ValueError(
                "`method` must be None for the dense gradients, or a method that sends values, "
                "such as TopK, PowerSGD or LocalSGD (`traits.rounds_values`). Coded rounds with "
                "values=codings.Half(); StreamingDiLoCo needs value_bits=32 here. "
                f"Received: method={self.method!r}"
            )

    @property
    def rounding(self) -> Rounding | BlockRounding:
        """The rounding of values."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """Name of the format, for `describe`."""
        raise NotImplementedError

    @property
    def delegate(self) -> Method | None:
        """The method that makes the exchange; `None` if this wrapper sums its input itself."""
        method = self.method
        if method == Dense():
            return None
        return None if isinstance(method, LocalSGD) and method.averages_changes else method

    @property
    @override
    def traits(self) -> Traits:
        inside = self.delegate
        kinds = {"residual": "sum"} if self.rounding.error_feedback else {}
        return dataclasses.replace(
            super().traits,
            paper="-",
            requests="all-to-all, then all-gather, of values; or as the method",
            state_kinds=kinds if inside is None else inside.traits.state_kinds,
            conserves=self.rounding.error_feedback
            and (self.method is None or self.method.traits.conserves),
            # Without a delegate, totals are the received values
            totals_may_overflow=inside is not None and inside.traits.totals_may_overflow,
        )

    @override
    def dense(self) -> Method:
        """Return the method for refused tensors, which are small and sent in float32."""
        return self if self.delegate is None else self.delegate.dense()

    @override
    def describe(self, spec: TensorSpec) -> str:
        return (self.method.describe(spec) if self.method else "sum") + f" in {self.name}"

    @override
    def init(self, layout: BucketLayout) -> State:
        return Method.init(self, layout) if self.delegate is None else self.delegate.init(layout)

    @override
    def payloads(self, layout: BucketLayout, step: int) -> Payloads | None:
        if self.delegate is None:
            elements = sum(s.size for s in layout.specs)
            return rounded_payloads(self.rounding, elements, layout.workers)
        inside = self.delegate.payloads(layout, step) or []
        if not inside or any(kind is not AllReduce for kind, _ in inside):
            return None  # messages of selected elements
        payloads: Payloads = []
        for number, (_, size) in enumerate(inside):
            finer = number < self.delegate.traits.finer_sums
            rounding = self.rounding.finer() if finer else self.rounding
            payloads += rounded_payloads(rounding, size // 4, layout.workers)
        return payloads

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        ctx = dataclasses.replace(ctx, rounding=self.rounding)
        if self.delegate is not None:
            return (yield from self.delegate.exchange(grads, state, ctx))
        values = grads if ctx.scale is None else feedback.scaled(grads, ctx.scale)
        residuals = state["residual"] if self.rounding.error_feedback else ()
        totals, errors = yield from all_reduce(ctx, values, residuals)
        return totals, {"residual": errors} if self.rounding.error_feedback else {}


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class HalfPrecision(RoundingWrapper):
    """16-bit values on the wire, for dense gradients or for the values of another method.

    It has the smallest overhead of all methods and is the baseline for the others. On every worker,
    with gradient g, residual e, and H(x) the nearest 16-bit number:

        p = g + e
        s = p + sum over the other workers of H(p), in float32      each worker sums one part
        total = H(s)
        e <- p - H(p);  in the part that this worker sums: e <- s - H(s)

    A sparsifier's selected elements are gathered as H(p), two per word, and its residual receives
    p - H(p): 48 bits per element instead of 64 (`codings/`).

    Formats. float16 has 11 significant bits between 6e-5 and 65504; bfloat16 has 8, and the range
    of float32. The residual keeps values that are too small for float16. A value or sum that is too
    large is non-finite: all workers skip the step, and `exchange.skipped` counts it. Gradients are
    divided by the number of workers, so their sums hardly grow with it.

    Without error feedback the 16-bit numbers are all-reduced directly, as is common. Each partial
    sum is then rounded, small values are lost, and there is no residual.

    Args:
        method: The method whose values are rounded: `None` for the dense gradients, or a method
            that sends values, such as `RedSync`, `TopK`, `RandomBlock` or `PowerSGD`, whose
            residual keeps the rounding errors. Methods that send signs or codes are refused.
        dtype: `"float16"` or `"bfloat16"`.
        error_feedback: Whether the residual keeps rounding errors.

    Raises:
        ValueError: If the dtype is unknown, or the method's values cannot be rounded.

    Example:
        >>> import tf_redsync as rs
        >>> rs.HalfPrecision(method=rs.RandomBlock(density=0.1), dtype="bfloat16").traits.conserves
        True
    """

    dtype: str = "float16"
    error_feedback: bool = True

    @override
    def __post_init__(self) -> None:
        checks.choice("dtype", self.dtype, HALVES)
        checks.boolean("error_feedback", self.error_feedback)
        super().__post_init__()

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(super().traits, bits="16 (1 + 1 / K)")

    @property
    @override
    def rounding(self) -> Rounding:
        return Rounding(self.dtype, self.error_feedback)

    @property
    @override
    def name(self) -> str:
        return self.dtype
