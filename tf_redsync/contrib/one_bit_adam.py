"""1-bit Adam."""

from __future__ import annotations

import dataclasses

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.config import register
from tf_redsync.contrib.one_bit import OneBitSGD
from tf_redsync.exchange import feedback
from tf_redsync.exchange.capabilities import AdamMoments, DenseStart, LocalUpdate
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.method import Exchange, Method, State
from tf_redsync.exchange.requests import AllReduce
from tf_redsync.exchange.sync_schedule import Intervals, SyncSchedule
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


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroOneAdam(AdamMoments, LocalUpdate, Method):
    """0/1 Adam: one bit from the start, a dense step ever more rarely, and then local steps.

    Once steps are local, workers' weights differ between two exchanges. A round ends early where an
    epoch ends and where an evaluation or saving begins, so that all agree on the weights there; in
    a custom loop call `optimizer.exchange.to_consensus()`.

    Yucheng Lu, Conglong Li, Minjia Zhang, Christopher De Sa, Yuxiong He (2022), "Maximizing
    Communication Efficiency for Large-scale Training via 0/1 Adam", ICLR 2023, arXiv 2202.06009,
    algorithm 1 and section 6.

    The inner optimizer is Keras's Adam or AdamW. With gradient g of one of K workers, weights w,
    p = sqrt(v) + epsilon, and W the weights that all agree on:

        dense steps, at distances of 1, 2, 4 and so on, each `variance_updates` times:
            g <- mean over workers of g                            one all-reduce
            m <- beta_1 m + (1 - beta_1) g;  v <- beta_2 v + (1 - beta_2) g^2
            w <- w - eta m / p
        the other steps before step `start`:
            m <- mean of beta_1 m + (1 - beta_1) g, in one bit     as in `OneBitAdam`
            w <- w - eta m / p
        from step `start` on, in rounds of n = 1, 2, 4 and so on, up to `steps`, steps:
            n times: m <- beta_1 m + (1 - beta_1) g;  w <- w - eta m / p        alone
            u = p (W - w) / sum of eta                             the mean momentum of the round
            m <- mean of u, in one bit
            W <- W - (sum of eta) m / p;  w <- W

    What one bit loses, of one stage and of the next, is added to the next momentum. v is corrected
    for its bias by the number of its updates, and stays as it is from `start` on. An element whose
    v is 0, for it had no gradient in any dense step, stays as it is, for one bit cannot say 0: rows
    of an embedding that occur late want another method.

    Differences from the paper

    * In a dense step the mean gradient, which has been sent, moves the momentum too, as in the
      authors' code.
    * Codes are those of `OneBitSGD`, and errors have the unit of a momentum: where learning rates
      change, the error of u does not.
    * Adam corrects the bias of m as well, so eta is in units of 1 - beta_1^t. AdamW's decay moves w
      in a round and so is in u, as in the authors' code.
    * Tensors of all sizes are sent so. With one worker it is Adam.

    Args:
        start: Step from which on steps are local and the variance stays: the end of the learning
            rate's warm-up, 12,500 for BERT, in the paper. Below 1: this fraction of the steps that
            the first `fit` runs.
        steps: Most local steps between two exchanges, 16 in the paper.
        double_after: After so many steps the number of local steps doubles: those in which the
            learning rate halves in the paper. Below 1 a fraction, as `start`.
        variance_updates: After so many dense steps their distance doubles, 16 in the paper.
        beta_1: Of the inner optimizer, in (0, 1).
        beta_2: The same.
        epsilon: The same, at least 0.

    Raises:
        ValueError: for a hyper-parameter out of its range.

    Example:
        >>> import keras
        >>> import tf_redsync as rs
        >>> method = rs.contrib.ZeroOneAdam(start=0.1, double_after=0.2)
        >>> optimizer = rs.DistributedOptimizer(keras.optimizers.Adam(1e-3), method)
    """

    start: int | float = 12_500
    steps: int = 16
    double_after: int | float = 32_768
    variance_updates: int = 16
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7

    def __post_init__(self) -> None:
        for name in ("steps", "variance_updates"):
            checks.integer(name, getattr(self, name), low=1)
        for name in ("start", "double_after"):
            checks.steps_or_fraction(name, getattr(self, name))
        for name in ("beta_1", "beta_2"):
            checks.real(name, getattr(self, name), low=0.0, high=1.0, low_open=True, high_open=True)
        checks.real("epsilon", self.epsilon, low=0.0, high=1.0)

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Lu et al. 2022",
            requests="all-to-all, then all-gather, of signs and means of momenta",
            bits="(1 + 1 / K) / steps",
            state_kinds={
                "momentum": "mean",
                "variance": "shared",
                "residual": "sum",
                "updates": "shared",
                "rates": "mean",
            },
            # Totals are momenta
            conserves=False,
            # They are means that one worker has sent, and it has looked at them
            totals_may_overflow=False,
        )

    @property
    @override
    def adam(self) -> dict[str, float]:
        return {"beta_1": self.beta_1, "beta_2": self.beta_2, "epsilon": self.epsilon}

    @property
    @override
    def sync_schedule(self) -> SyncSchedule:
        intervals = Intervals(
            dense_double_after=self.variance_updates,
            local_start=self.start,
            local_double_after=self.double_after,
        )
        return SyncSchedule(local_steps=self.steps, intervals=intervals)

    @override
    def dense(self) -> Method:
        """There is no tensor that it refuses."""
        return self

    @override
    def describe(self, spec: TensorSpec) -> str:
        begin = f"step {self.start:,}" if self.start >= 1 else f"{self.start:.4g} of `fit`"
        return (
            f"signs and two means of Adam's momentum, twice; from {begin} on every {self.steps} "
            "steps at most"
        )

    @override
    def init(self, layout: BucketLayout) -> State:
        numbers = {"updates": [tf.zeros([])], "rates": [tf.zeros([])]}
        return {**super().init(layout), **numbers}

    @override
    def dense_exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        """A step that moves the variance."""
        totals = yield AllReduce(feedback.scaled(grads, ctx.scale))
        (updates,) = state["updates"]
        weight = (1.0 - self.beta_2) / (1.0 - self.beta_2 ** (updates + 1.0))
        variances = [
            (1.0 - weight) * v + weight * g**2
            for v, g in zip(state["variance"], totals, strict=True)
        ]
        momenta = self._momenta(state, totals)
        new = {"momentum": momenta, "variance": variances, "updates": [updates + 1.0]}
        return totals, {**state, **new}

    def momentum_exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        """A step of all workers at the variance as it is; its totals are momenta."""
        workers = ctx.layout.workers
        own = [
            self.beta_1 * m / workers + (1.0 - self.beta_1) * g
            for m, g in zip(state["momentum"], feedback.scaled(grads, ctx.scale), strict=True)
        ]
        momenta, left = yield from in_one_bit(own, _seen(state), state, ctx)
        return momenta, {**state, "momentum": momenta, **left}

    @override
    def alone(self, totals: list[tf.Tensor], state: State) -> tuple[list[tf.Tensor], State]:
        """A local step: the worker's momentum follows its own gradient."""
        momenta = [
            tf.where(s, m, 0.0 * m)
            for s, m in zip(_seen(state), self._momenta(state, totals), strict=True)
        ]
        return momenta, {**state, "momentum": momenta}

    def rate_of_step(self, rate: tf.Tensor, steps: tf.Tensor) -> tf.Tensor:
        """Return what Adam multiplies m / p by in a step.

        Args:
            rate: The learning rate.
            steps: Number of steps so far, this one included, float32 scalar.
        """
        return rate / (1.0 - self.beta_1**steps)

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        """The end of a round: here the gradients are the changes of the weights, over K."""
        (rates,) = yield AllReduce([state["rates"][0] / ctx.layout.workers])
        scales = [tf.sqrt(v) + self.epsilon for v in state["variance"]]
        over_rates = tf.math.divide_no_nan(1.0, rates)  # a factor: what is not finite stays so
        own = [-p * d * over_rates for p, d in zip(scales, grads, strict=True)]
        momenta, left = yield from in_one_bit(own, _seen(state), state, ctx)
        moved = [tf.math.divide_no_nan(-rates * m, p) for m, p in zip(momenta, scales, strict=True)]
        return moved, {**state, "momentum": momenta, "rates": [tf.zeros([])], **left}

    def _momenta(self, state: State, grads: list[tf.Tensor]) -> list[tf.Tensor]:
        return [
            self.beta_1 * m + (1.0 - self.beta_1) * g
            for m, g in zip(state["momentum"], grads, strict=True)
        ]


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


def _seen(state: State) -> list[tf.Tensor]:
    """What has had a gradient in a dense step."""
    return [v > 0.0 for v in state["variance"]]
