"""Sums of values that travel in 16 bits."""

from __future__ import annotations

import dataclasses

from typing_extensions import override

from tf_redsync import checks
from tf_redsync.codings.plain import HALVES
from tf_redsync.config import register
from tf_redsync.exchange.context import Rounding
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.rounding_wrapper import RoundingWrapper


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class HalfPrecision(RoundingWrapper):
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
