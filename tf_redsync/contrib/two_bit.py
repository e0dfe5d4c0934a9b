"""Three values by a threshold, with error feedback."""

from __future__ import annotations

import dataclasses

from typing_extensions import override

from tf_redsync.config import register
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.threshold_codes import ThresholdCodes


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoBit(ThresholdCodes):
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

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Strom 2015; MXNet 2017",
            requests="all-gather of codes and thresholds",
            bits="2",
        )
