"""Dense all-reduce without compression, and no exchange: the baselines."""

from __future__ import annotations

import dataclasses

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.config import register
from tf_redsync.exchange import feedback
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.method import (
    Exchange,
    Method,
    Payloads,
    State,
)
from tf_redsync.exchange.requests import AllReduce
from tf_redsync.exchange.traits import Traits


class MomentumInExchange(Method):
    """A method whose exchange applies the momentum, instead of the inner optimizer.

    Attributes:
        momentum: In [0, 1); 0 leaves the momentum to the inner optimizer.
    """

    momentum: float

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            # Momentum adds to the totals
            conserves=self.momentum == 0.0,
            momentum_in_exchange=self.momentum,
        )


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense(MomentumInExchange):
    """All-reduce of the full gradients, optionally with momentum on the total.

    With `m` the momentum and `G` the sum of the gradients over workers: `u <- m u + G`, total `u`
    (Nesterov: `u <- m (u + G)`, total `u + G`). Methods with momentum correction use it for their
    uncompressed tensors (biases, norms), so that all variables have the same momentum.

    Args:
        momentum: Momentum of the exchange, in [0, 1). 0 leaves the momentum to the inner optimizer.
        nesterov: Whether to use Nesterov momentum; needs `momentum`.

    Raises:
        ValueError: If the momentum is outside [0, 1), or `nesterov` is set without momentum.
    """

    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        checks.momentum(self.momentum, self.nesterov)

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="-",
            requests="all-reduce",
            bits="32",
            state_kinds={"velocity": "shared"},
            # Without momentum, totals are results of the all-reduce
            totals_may_overflow=self.momentum != 0.0,
        )

    @override
    def describe(self, spec: TensorSpec) -> str:
        return "all-reduce"

    @override
    def dense(self) -> Method:
        return self

    @override
    def payloads(self, layout: BucketLayout, step: int) -> Payloads:
        return [(AllReduce, sum(s.bytes for s in layout.specs))]

    @override
    def init(self, layout: BucketLayout) -> State:
        if self.momentum == 0.0:
            return {"velocity": []}
        return {"velocity": [tf.zeros(s.shape, tf.float32) for s in layout.specs]}

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        totals = yield AllReduce(grads if ctx.scale is None else feedback.scaled(grads, ctx.scale))
        if self.momentum == 0.0:
            return totals, state
        totals, velocity = feedback.momentum_step(
            totals, state["velocity"], self.momentum, self.nesterov
        )
        return totals, {"velocity": velocity}

    dense_exchange = exchange


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class NoExchange(Method):
    """Exchange nothing: every worker applies its own gradients.

    The workers' weights diverge, so this is for measurements only: it gives the step time without
    communication, a lower bound for all methods. Workers do not agree on non-finite steps either,
    so a step with non-finite gradients is applied.
    """

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="-",
            requests="none",
            exchanges=False,
            bits="0",
            conserves=False,
            # Totals differ between workers, which therefore cannot agree to skip a step
            totals_may_overflow=False,
        )

    @override
    def dense(self) -> Method:
        return self

    @override
    def describe(self, spec: TensorSpec) -> str:
        return "nothing is sent"

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        yield from ()
        return feedback.scaled(grads, ctx.scale), state
