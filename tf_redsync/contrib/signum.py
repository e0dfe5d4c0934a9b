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

    Totals are -1, 0 or 1, whatever the scale of the gradient: a step moves a weight by the learning
    rate or not at all, so the learning rate must be much smaller than that of SGD, like that of
    Adam. The method serves all tensors, since dense totals would need another learning rate. A tie,
    which an even number of workers can have, is 0, and the weight does not change.

    Differences from the paper

    * A bit cannot encode zero. An element whose gradient is exactly 0 (a dead ReLU, a word that
      does not occur) votes for 1 and -1 in turn, by step and worker. The usual code `g >= 0` would
      always vote for 1, and weights without a gradient would drift.
    * With one worker the total is the sign of its momentum.

    Args:
        momentum: m, coefficient of the moving average of the gradient, in [0, 1). The inner
            optimizer must have no momentum.

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
        """Return the momenta, which are also the new state."""
        m = self.momentum
        velocity = [m * u + (1.0 - m) * g for u, g in zip(state["velocity"], grads, strict=True)]
        return velocity, {"velocity": velocity}
