"""Signum: majority vote of the signs of the workers' momenta."""

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
    """Signum: majority vote of the signs of the workers' momenta.

    Jeremy Bernstein, Yu-Xiang Wang, Kamyar Azizzadenesheli, Anima Anandkumar (2018), "signSGD:
    Compressed Optimisation for Non-Convex Problems", ICML, arXiv 1802.04434.

    On every worker, with gradient g, momentum buffer u and coefficient m, one bit per element:

        u <- m u + (1 - m) g
        send sign(u)                            one all-gather
        total = sign(sum over workers of signs)

    Totals are -1, 0 and 1, so every step changes a weight by the learning rate or not at all. Use a
    much smaller learning rate than with SGD, about that of Adam. No tensor is sent densely, since
    dense totals would need another learning rate. A tie, possible for an even number of workers,
    gives 0 and leaves the weight unchanged.

    Differences from the paper

    * One bit cannot represent zero. The vote for a momentum of exactly 0 (an inactive unit, an
      absent word) alternates between 1 and -1 by step and worker. The common code `u >= 0` would
      always vote for 1, so that weights without a gradient drift.
    * With one worker the total is the sign of its momentum.

    Args:
        momentum: m, coefficient of the moving average of the gradient, in [0, 1). The inner
            optimizer must have no momentum.

    Raises:
        ValueError: If the momentum is outside [0, 1).
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
        """Return the momenta, which are also the new state."""
        m = self.momentum
        velocity = [m * u + (1.0 - m) * g for u, g in zip(state["velocity"], grads, strict=True)]
        return velocity, {"velocity": velocity}
