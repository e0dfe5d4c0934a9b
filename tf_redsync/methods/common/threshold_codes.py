"""Ternary quantization to a threshold, its negative and zero, with error feedback."""

from __future__ import annotations

import dataclasses

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.exchange import feedback
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import TensorSpec
from tf_redsync.exchange.method import Exchange, State
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.quantizer import Quantizer, deliver_codes, largest, rms

UNITS = ("rms", "absolute")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThresholdCodes(Quantizer):
    """A quantizer to a threshold, its negative, or zero, in two bits, with error feedback.

    Args:
        threshold: Threshold, and the magnitude that is sent of an element that reaches it; above 0.
        unit: `"rms"`: the threshold is in units of the root mean square of gradient plus residual,
            of each tensor in each step. `"absolute"`: in units of the optimizer's gradients.
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: If an argument is out of range; the message names it.
    """

    threshold: float = 1.0
    unit: str = "rms"

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        checks.real("threshold", self.threshold, low=0.0, high=1e30, low_open=True)
        checks.choice("unit", self.unit, UNITS)

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(super().traits, state_kinds={"residual": "sum"})

    @override
    def describe(self, spec: TensorSpec) -> str:
        return f"2 bits, threshold {self.threshold:g} {self.unit}"

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        grads = feedback.scaled(grads, ctx.scale)
        sums = [e + g for e, g in zip(state["residual"], grads, strict=True)]
        thresholds = tf.fill([len(sums)], tf.constant(self.threshold, tf.float32))
        if self.unit == "rms":
            rows = [tf.reshape(p, [1, -1]) for p in sums]
            units = [rms(r, s.size) for r, s in zip(rows, ctx.layout.specs, strict=True)]
            maxima = tf.concat([largest(r) for r in rows], axis=0)
            thresholds = tf.minimum(thresholds * tf.concat(units, axis=0), maxima)
        totals, residuals = yield from deliver_codes(
            sums, thresholds, errors=True, mode="threshold"
        )
        return totals, {"residual": residuals}
