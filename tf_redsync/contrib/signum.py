"""Majority vote of the signs of the workers' momenta."""

from __future__ import annotations

import dataclasses

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.config import register
from tf_redsync.exchange.layout import TensorSpec
from tf_redsync.exchange.method import State
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.signs import SignSGD


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Signum(SignSGD):
    """Signum: the majority of the signs of the workers' momenta.

    Jeremy Bernstein, Yu-Xiang Wang, Kamyar Azizzadenesheli, Anima Anandkumar (2018), "signSGD:
    Compressed Optimisation for Non-Convex Problems", ICML, arXiv 1802.04434.

    On every worker, with gradient g, velocity u and momentum m, and one bit an element:

        u <- m u + (1 - m) g
        send sign(u)                            one all-gather
        total = sign(sum over workers of signs)

    Totals are -1, 0 and 1, whatever the gradient's unit: every step moves a weight by the learning
    rate or not at all, so it has to be much smaller than SGD's, like Adam's. All tensors are
    served, since dense totals next to these would need another learning rate. A tie of the votes,
    as an even number of workers can have, is 0: the weight stays.

    Differences from the paper

    * A bit has no value for zero. An element whose gradient is exactly 0 (a unit that is off, a
      word that does not occur) votes for 1 and -1 in turn, by step and worker, where the usual code
      `g >= 0` would always vote for 1 and make weights without a gradient drift.
    * With one worker the total is still the sign of its velocity.

    Args:
        momentum: m of the moving average of the gradient, in [0, 1). The inner optimizer must have
            none.

    Raises:
        ValueError: for a momentum out of its range.
    """

    momentum: float = 0.9

    def __post_init__(self) -> None:
        checks.real("momentum", self.momentum, low=0.0, high=1.0, high_open=True)

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            state_kinds={"velocity": "sum"},
            momentum_in_exchange=self.momentum,
        )

    @override
    def describe(self, spec: TensorSpec) -> str:
        return "majority of the momenta's signs"

    @override
    def directions(
        self, grads: list[tf.Tensor], state: State
    ) -> tuple[list[tf.Tensor], dict[str, list[tf.Tensor]]]:
        """Return the momenta, which are the new state too."""
        m = self.momentum
        velocity = [m * u + (1.0 - m) * g for u, g in zip(state["velocity"], grads, strict=True)]
        return velocity, {"velocity": velocity}
