"""Compression and delay compensation."""

from __future__ import annotations

import dataclasses

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.config import register
from tf_redsync.exchange.capabilities import EvaluationPoint
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import TensorSpec
from tf_redsync.exchange.method import Exchange, Method, State
from tf_redsync.exchange.sync_schedule import SyncSchedule
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.threshold_codes import ThresholdCodes
from tf_redsync.schedules import DenseWarmUp, check_warm_up, dense_steps


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class CDSGD(EvaluationPoint, ThresholdCodes):
    """CD-SGD: compression with a delay of one step, which a local update makes up for.

    The inner optimizer must be SGD, with or without momentum. The model's weights are each worker's
    own while it trains. Epochs end at weights that all agree on, and evaluations and saving begin
    with them; in a custom loop call `optimizer.exchange.to_consensus()`.

    Enda Yu, Dezun Dong, Yemao Xu, Shuo Ouyang, Xiangke Liao (2021), "CD-SGD: Distributed Stochastic
    Gradient Descent with Compression and Delay Compensation", ICPP, arXiv 2106.10796.

    With W the weights that all workers agree on, w a worker's own, r the residual, in every step:

        g = gradient at w
        W <- optimizer(W, sum over workers of what was sent of the last step's g)
        w <- W - local_learning_rate g              own point: the update that is still under way
        send g while the next step's gradient is being computed: 2-bit codes of r + g, as `TwoBit`;
        every k-th step all of g, and r waits           k-step correction

    With plain SGD of the same learning rate, the mean of the workers' w is where W would be without
    the delay, so on a quadratic, sent in full, CD-SGD takes the steps of synchronous SGD.

    Differences from the paper

    * No parameter server: codes are all-gathered, full gradients all-reduced, and every worker
      applies the sum by the same optimizer. The gradient there is the sum that Keras expects.
    * The threshold is in units of the root mean square of r + g; see `TwoBit`.
    * Biases, norms and small tensors are sent in full in every step, with the same delay.
    * The first step after the warm-up applies a gradient of zero, and the last one's is not
      applied.

    Args:
        threshold: See `TwoBit`.
        unit: See `TwoBit`.
        full_every: k: every so many steps the full gradient is sent; 1: always.
        local_learning_rate: Of the local update. `None`: the optimizer's, which is what makes up
            for the delay.
        warm_up: `DenseWarmUp(steps)`: so many synchronous steps first; `None`: none.
        dense_below: Tensors of fewer float32 bytes are sent in full in every step.

    Raises:
        ValueError: for a hyper-parameter out of its range.
    """

    full_every: int = 5
    local_learning_rate: float | None = None
    warm_up: DenseWarmUp | None = DenseWarmUp(1000)

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer("full_every", self.full_every, low=1)
        if self.local_learning_rate is not None:
            checks.real("local_learning_rate", self.local_learning_rate, low=0.0, high=float("inf"))
        check_warm_up(self.warm_up, DenseWarmUp)

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Yu, Dong, Xu, Ouyang, Liao 2021",
            requests="all-gather of codes, every k-th step all-reduce; one step late",
            bits="(2 (k - 1) + 32) / k",
        )

    @property
    @override
    def sync_schedule(self) -> SyncSchedule:
        return SyncSchedule(
            warm_up_steps=dense_steps(self.warm_up),
            dense_every=self.full_every if self.full_every > 1 else 0,
            delay=1,
            own_point=True,
        )

    @override
    def refuses(self, spec: TensorSpec) -> str | None:
        return None if self.full_every == 1 else super().refuses(spec)

    @override
    def dense(self) -> Method:
        return dataclasses.replace(self, full_every=1)

    @override
    def describe(self, spec: TensorSpec) -> str:
        if self.full_every == 1:
            return "in full, one step late"
        return f"{super().describe(spec)}, full every {self.full_every} steps, one step late"

    @override
    def point(
        self,
        weights: list[tf.Tensor],
        grads: list[tf.Tensor],
        state: State,
        rate: tf.Tensor,
        workers: int,
    ) -> list[tf.Tensor]:
        """Keras has divided the loss by the workers: g is `workers * grad`."""
        if self.local_learning_rate is not None:
            rate = tf.constant(self.local_learning_rate, tf.float32)
        return [w - rate * (workers * g) for w, g in zip(weights, grads, strict=True)]

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        """Exchange the gradients of the previous step, which `PerturbedPoint` passes."""
        if self.full_every > 1:
            return (yield from super().exchange(grads, state, ctx))
        return (yield from self.dense_exchange(grads, state, ctx))
