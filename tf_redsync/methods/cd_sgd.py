"""CD-SGD: gradient compression with delay compensation."""

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
    """CD-SGD: compressed gradients applied one step late, with a local update in between.

    The inner optimizer must be SGD, with or without momentum. During training, each worker has its
    own weights. The workers return to the common weights when an epoch ends and before an
    evaluation or a save. In a custom loop call `optimizer.exchange.to_consensus()`.

    Enda Yu, Dezun Dong, Yemao Xu, Shuo Ouyang, Xiangke Liao (2021), "CD-SGD: Distributed Stochastic
    Gradient Descent with Compression and Delay Compensation", ICPP, arXiv 2106.10796.

    With the common weights W, this worker's weights w and the residual r, in every step:

        g = gradient at w
        W <- optimizer(W, mean over workers of the messages of the last step)
        w <- W - local_learning_rate g              local update, instead of the delayed total
        send 2-bit codes of r + g, as `TwoBit`      while the next gradient is computed
        r <- r + g - codes
        every k-th step: send g in full; r stays        k-step correction

    With plain SGD of the same learning rate, the mean of the workers' w is the W that training
    without the delay would have. On a quadratic loss with full gradients, CD-SGD therefore takes
    the steps of synchronous SGD.

    Differences from the paper

    * No parameter server: codes are all-gathered, full gradients are all-reduced, and every worker
      applies the mean with the same optimizer.
    * The threshold is in units of the root mean square of r + g; see `TwoBit`.
    * The local update is a step of plain SGD. In the authors' code a local optimizer takes it,
      which may have momentum of its own.
    * Biases, norms and small tensors are sent in full in every step, with the same delay.
    * The first step after the warm-up applies a gradient of zero, and the gradient of the last step
      is not applied.

    Args:
        threshold: See `TwoBit`.
        unit: See `TwoBit`.
        full_every: k, the interval in steps between full gradients; 1: always send in full.
        local_learning_rate: Learning rate of the local update. `None`: the optimizer's, which
            compensates for the delay.
        warm_up: `DenseWarmUp(steps)`, the number of synchronous steps at the start; `None`: no
            warm-up.
        dense_below: Tensors of fewer float32 bytes are sent in full in every step.

    Raises:
        ValueError: If an argument is out of range; the message names it.
    """

    full_every: int = 5
    local_learning_rate: float | None = None
    warm_up: DenseWarmUp | None = DenseWarmUp(1000)

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer("full_every", self.full_every, low=1)
        if self.local_learning_rate is not None:
            rate = self.local_learning_rate
            checks.real("local_learning_rate", rate, low=0.0, high=float("inf"), high_open=True)
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
        """Return `w - rate g`. Keras divided the loss by the workers, so g is `workers * grad`."""
        if self.local_learning_rate is not None:
            rate = tf.constant(self.local_learning_rate, tf.float32)
        return [w - rate * (workers * g) for w, g in zip(weights, grads, strict=True)]

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        """Exchange the gradients of the previous step."""
        if self.full_every > 1:
            return (yield from super().exchange(grads, state, ctx))
        return (yield from self.dense_exchange(grads, state, ctx))
