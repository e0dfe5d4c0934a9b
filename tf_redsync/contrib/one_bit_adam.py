"""1-bit Adam."""

from __future__ import annotations

import dataclasses

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.config import register
from tf_redsync.contrib.one_bit import OneBitSGD
from tf_redsync.exchange import feedback
from tf_redsync.exchange.capabilities import AdamMoments, DenseStart
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.method import Exchange, State
from tf_redsync.exchange.requests import AllReduce
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.quantizer import Quantizer
from tf_redsync.schedules import DenseWarmUp


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class OneBitAdam(AdamMoments, DenseStart, Quantizer):
    """1-bit Adam: Adam at first, then its momentum in one bit, at the variance that it has by then.

    Hanlin Tang, Shaoduo Gan, Ammar Ahmad Awan, Samyam Rajbhandari, Conglong Li, Xiangru Lian, Ji
    Liu, Ce Zhang, Yuxiong He (2021), "1-bit Adam: Communication Efficient Large-Scale Training with
    Adam's Convergence Speed", ICML, arXiv 2102.02888, algorithm 1.

    The inner optimizer is Keras's Adam or AdamW. In the dense beginning, `warm_up`, it is left
    alone; m is its momentum. Then, on every worker, with gradient g and the mean over K workers:

        m_i = beta_1 m + (1 - beta_1) g
        m <- mean of m_i, in one bit and with feedback of both errors      as `OneBitSGD` adds up
        w <- w - eta m / (sqrt(v) + epsilon)                               v stays as it is

    Momentum changes slowly, so its errors can be made up for; gradients in one bit would make the
    variance useless. An element that has had no gradient in the first stage has v = 0: it stays as
    it is from then on, and its m stays 0, for one bit cannot say 0. One that has had few has a
    small v, and one bit gives it a mean of all momenta, so it takes large steps. Rows of an
    embedding that occur late or seldom need a long first stage, or another method (`Policy`).

    Differences from the paper

    * Codes are those of `OneBitSGD`: two means for each worker's block of a tensor in place of a
      sign times a norm, and one residual for the block that a worker adds up itself.
    * The variance stays as Adam corrects its bias, v / (1 - beta_2^t), which after thousands of
      steps is v. The authors' code has no correction and long first stages.
    * Biases, norms and small tensors are all-reduced densely in both stages, and Adam's variance of
      them moves on.
    * With one worker it is Adam.

    Args:
        warm_up: The first stage, of steps or a fraction of those that `fit` runs: 15 to 25 % in the
            paper.
        beta_1: Of the inner optimizer, in (0, 1).
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: for a hyper-parameter out of its range.

    Example:
        >>> import keras
        >>> import tf_redsync as rs
        >>> method = rs.contrib.OneBitAdam(warm_up=rs.DenseWarmUp(fraction=0.2))
        >>> optimizer = rs.DistributedOptimizer(keras.optimizers.Adam(1e-3), method)
    """

    warm_up: DenseWarmUp = DenseWarmUp(fraction=0.2)
    beta_1: float = 0.9

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.warm_up, DenseWarmUp):
            raise ValueError(
                "`warm_up` must be DenseWarmUp(...): the variance is that of the first steps. "
                f"Received: warm_up={self.warm_up!r}"
            )
        checks.real("beta_1", self.beta_1, low=0.0, high=1.0, low_open=True, high_open=True)

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Tang et al. 2021",
            requests="all-to-all, then all-gather, of signs and means of momenta",
            bits="1 + 1 / K",
            state_kinds={
                "momentum": "shared",
                "seen": "shared",
                "residual": "sum",
            },
            # Totals are momenta
            conserves=False,
            # They are means that one worker has sent, and it has looked at them
            totals_may_overflow=False,
        )

    @property
    @override
    def dense_start(self) -> DenseWarmUp:
        return self.warm_up

    @property
    @override
    def adam(self) -> dict[str, float]:
        return {"beta_1": self.beta_1}

    @override
    def describe(self, spec: TensorSpec) -> str:
        return "signs and two means of Adam's momentum, twice"

    @override
    def init(self, layout: BucketLayout) -> State:
        """No element has had a gradient."""
        return {**super().init(layout), "seen": [tf.zeros(s.shape) for s in layout.specs]}

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        workers, momenta = ctx.layout.workers, state["momentum"]
        own = [
            self.beta_1 * m / workers + (1.0 - self.beta_1) * g
            for m, g in zip(momenta, feedback.scaled(grads, ctx.scale), strict=True)
        ]
        seen = [s > 0.0 for s in state["seen"]]
        new, left = yield from in_one_bit(own, seen, state, ctx)
        return new, {**state, "momentum": new, **left}

    @override
    def dense_exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        """The first stage: Adam's own momentum follows from the same sums."""
        totals = yield AllReduce(feedback.scaled(grads, ctx.scale))
        momenta = [
            self.beta_1 * m + (1.0 - self.beta_1) * g
            for m, g in zip(state["momentum"], totals, strict=True)
        ]
        # A momentum of 0 does not tell: where no gradients follow it underflows.
        # As float32, 0 or 1: GPUs keep bools of a step with conditions in the host's memory.
        seen = [
            tf.where(tf.not_equal(g, 0.0), 1.0, s)
            for s, g in zip(state["seen"], totals, strict=True)
        ]
        return totals, {**state, "momentum": momenta, "seen": seen}


def in_one_bit(own: list[tf.Tensor], seen: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
    """Add up as `OneBitSGD` does, where elements are `seen`; the others are and stay 0.

    Args:
        own: This worker's summands.
        seen: bool, of the same shapes, equal on all workers.
        state: This worker's, with its `residual`.
        ctx: Of the bucket.

    Returns:
        The sums, and the new residuals in a state of their own.
    """
    # 0 x, and not 0: what is not finite must be seen
    masked = [tf.where(s, x, 0.0 * x) for s, x in zip(seen, own, strict=True)]
    plain, summed = dataclasses.replace(ctx, scale=None), OneBitSGD(dense_below=0)
    sums, new = yield from summed.exchange(masked, {"residual": state["residual"]}, plain)
    kept, left = (
        [tf.where(s, x, 0.0) for s, x in zip(seen, tensors, strict=True)]
        for tensors in (sums, new["residual"])
    )
    return kept, {"residual": left}
