"""Three values by a threshold, with error feedback."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.config import register
from tf_redsync.exchange import feedback
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import TensorSpec
from tf_redsync.exchange.method import Exchange, State
from tf_redsync.methods.common.quantizer import Quantizer, deliver_codes, largest, rms

UNITS = ("rms", "absolute")


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoBit(Quantizer):
    """2-bit: every element is a positive threshold, its negative, or zero, with error feedback.

    Nikko Strom (2015), "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing",
    Interspeech, for the rule; Apache MXNet (2017), "Gradient Compression", for the 2-bit codes.

    On every worker, with gradient g and residual e, for each tensor:

        p = g + e,  c = threshold
        code = 1 where p >= c, -1 where p <= -c, else 0
        e <- p - c code
        total = sum over workers of c code              one all-gather of codes and c

    Differences from the papers

    * The threshold is in units of the root mean square of p, of each tensor in each step, and at
      most max |p|, so that something is always sent. The papers' is a constant, which fits neither
      another batch size nor another number of workers: `unit="absolute"`.
    * Biases, norms and small tensors are all-reduced densely.

    Args:
        threshold: What is sent of an element that reaches it, above 0. With unit `"rms"` one
            standard deviation is near the best choice for normal gradients.
        unit: `"rms"`: in units of the root mean square of gradient plus residual. `"absolute"`: of
            the gradient as the optimizer gets it, divided by the size of the global batch: MXNet's
            0.5 is for sums over a batch, and would hardly be reached here. Nor must it be too
            small, for an element sends no more than the threshold in a step.
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: for a hyper-parameter out of its range.
    """

    threshold: float = 1.0
    unit: str = "rms"

    paper: ClassVar[str] = "Strom 2015; MXNet 2017"
    requests: ClassVar[str] = "all-gather of codes and thresholds"
    bits: ClassVar[str] = "2"
    state_kinds: ClassVar[dict[str, str]] = {"residual": "sum"}

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        checks.real("threshold", self.threshold, low=0.0, high=1e30, low_open=True)
        checks.choice("unit", self.unit, UNITS)

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
            most = tf.concat([largest(r) for r in rows], axis=0)
            thresholds = tf.minimum(thresholds * tf.concat(units, axis=0), most)
        totals, residuals = yield from deliver_codes(
            sums, thresholds, errors=True, mode="threshold"
        )
        return totals, {"residual": residuals}
