"""1-bit Adam and 0/1 Adam: Adam's momentum in one bit, with a frozen variance."""

from __future__ import annotations

import dataclasses

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.config import register
from tf_redsync.contrib.one_bit import one_bit_sum
from tf_redsync.exchange import feedback
from tf_redsync.exchange.capabilities import AdamMoments, DenseStart, LocalMomentum
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
    """1-bit Adam: dense Adam at first, then its momentum in one bit with a frozen variance.

    Hanlin Tang, Shaoduo Gan, Ammar Ahmad Awan, Samyam Rajbhandari, Conglong Li, Xiangru Lian, Ji
    Liu, Ce Zhang, Yuxiong He (2021), "1-bit Adam: Communication Efficient Large-Scale Training with
    Adam's Convergence Speed", ICML, arXiv 2102.02888, algorithm 1.

    The inner optimizer is Keras's Adam or AdamW. The warm-up stage, `warm_up`, is dense Adam; m is
    its momentum. Then, on every worker, with gradient g and means over K workers:

        m_i = beta_1 m + (1 - beta_1) g
        m <- mean of m_i, in one bit, with error feedback in both phases   as `OneBitSGD` sums
        w <- w - eta m / (sqrt(v) + epsilon)                               v is frozen

    Momentum changes slowly, so error feedback can compensate its errors. The variance is not
    linear in the gradient, so no error feedback could correct it for gradients in one bit. An
    element without a gradient in the warm-up stage has v = 0. From then on its m stays 0, because
    one bit cannot encode 0, so only weight decay changes it. An element with few gradients has a
    small v, and one bit gives it the mean of all momenta, so it takes large steps. Embedding rows
    that occur late or rarely need a long warm-up stage or another method (`Policy`).

    Differences from the paper

    * Codes are those of `OneBitSGD`: two means for each worker's block of a tensor instead of a
      sign and a norm. Elements with v = 0 are not counted in the means. A worker has a single
      residual for the block that it owns.
    * The variance is frozen after Adam's bias correction, v / (1 - beta_2^t), which equals v after
      thousands of steps. The authors' code has no correction and long warm-up stages.
    * Biases, norms and small tensors are all-reduced densely in both stages, and Adam keeps
      updating their variance.
    * With one worker it is Adam.

    Args:
        warm_up: The warm-up stage, in steps or as a fraction of the steps that `fit` runs: 15 to 25
            % in the paper.
        beta_1: beta_1 of the inner optimizer, in (0, 1).
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: If an argument is out of range; the message names it.

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
                "`warm_up` must be DenseWarmUp(...), which estimates the variance. "
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
            # Each total is a mean from one worker, which has checked it for overflow
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
        return "signs and two means of Adam's momentum in both phases"

    @override
    def init(self, layout: BucketLayout) -> State:
        """Return the base state, and `seen` as zeros: no element has had a gradient."""
        return {**super().init(layout), "seen": [tf.zeros(s.shape) for s in layout.specs]}

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        workers, momenta = ctx.layout.workers, state["momentum"]
        local_momenta = [
            self.beta_1 * m / workers + (1.0 - self.beta_1) * g
            for m, g in zip(momenta, feedback.scaled(grads, ctx.scale), strict=True)
        ]
        seen = [s > 0.0 for s in state["seen"]]
        new, left = yield from seen_sum(local_momenta, seen, state, ctx)
        return new, {**state, "momentum": new, **left}

    @override
    def dense_exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        """Run a step of the warm-up stage, and update the momentum as Adam does."""
        totals = yield AllReduce(feedback.scaled(grads, ctx.scale))
        momenta = [
            self.beta_1 * m + (1.0 - self.beta_1) * g
            for m, g in zip(state["momentum"], totals, strict=True)
        ]
        # A momentum of 0 is no criterion, because it underflows after many steps without a
        # gradient. `seen` is float32, 0 or 1: GPUs keep the bools of a conditional step in host
        # memory.
        seen = [
            tf.where(tf.not_equal(g, 0.0), 1.0, s)
            for s, g in zip(state["seen"], totals, strict=True)
        ]
        return totals, {**state, "momentum": momenta, "seen": seen}


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroOneAdam(AdamMoments, LocalMomentum, Method):
    """0/1 Adam: one bit from the start, dense steps at growing distances, then local steps.

    During local steps the weights of workers differ between two exchanges. The workers exchange
    early when an epoch ends and before an evaluation or a save, so that they have common weights
    there. In a custom loop call `optimizer.exchange.to_consensus()`.

    Yucheng Lu, Conglong Li, Minjia Zhang, Christopher De Sa, Yuxiong He (2022), "Maximizing
    Communication Efficiency for Large-scale Training via 0/1 Adam", ICLR 2023, arXiv 2202.06009,
    algorithm 1 and section 6.

    The inner optimizer is Keras's Adam or AdamW. With gradient g of one of K workers, weights w, p
    = sqrt(v) + epsilon, and W the weights after the last exchange, equal on all workers:

        dense steps, at distances of 1, 2, 4, ..., each `variance_updates` times:
            g <- mean over workers of g                            one all-reduce
            m <- beta_1 m + (1 - beta_1) g;  v <- beta_2 v + (1 - beta_2) g^2
            w <- w - eta m / p
        the other steps before step `start`:
            m <- mean of beta_1 m + (1 - beta_1) g, in one bit     as in `OneBitAdam`
            w <- w - eta m / p
        from step `start` on, in rounds of n = 1, 2, 4, ... steps, at most `steps`:
            n times: m <- beta_1 m + (1 - beta_1) g;  w <- w - eta m / p        local
            u = p (W - w) / sum of eta                             the mean momentum of the round
            m <- mean of u, in one bit
            W <- W - (sum of eta) m / p;  w <- W

    Error feedback adds the errors of both phases to the next momentum. v is bias-corrected by the
    number of its updates, and frozen from `start` on. An element with v = 0, which had no gradient
    in any dense step, does not change from `start` on, because one bit cannot encode 0; before,
    only weight decay changes it. Embedding rows that occur late need another method.

    Differences from the paper

    * A dense step also updates the momentum with the mean gradient, as in the authors' code.
    * Codes are those of `OneBitSGD`, and errors are in units of the momentum, so the error of u
      does not scale with the learning rate.
    * Adam corrects the bias of m too, so eta includes 1 / (1 - beta_1^t).
    * The weight decay of AdamW changes w within a round, so u and the next momentum contain it, as
      in the authors' code; the paper's u has only eta m. From `start` on it therefore acts
      1 / (1 - s) times, with s the mean of beta_1, ..., beta_1^n in rounds of n steps: for a beta_1
      of 0.9 10 times with n = 1, 4.4 times with n = 4, and 1.85 times with n = 16. Divide
      `weight_decay` by the factor of `steps`.
    * Tensors of all sizes are compressed. With one worker it is Adam.

    Args:
        start: Step at which local steps begin and the variance is frozen: the end of the learning
            rate warm-up in the paper, 12,500 for BERT. A value below 1 is a fraction of the steps
            that the first `fit` runs.
        steps: Maximum number of local steps between two exchanges, 16 in the paper.
        double_after: Steps after which the number of local steps doubles; in the paper the steps in
            which the learning rate halves. A value below 1 is a fraction, as for `start`.
        variance_updates: Number of dense steps after which their distance doubles, 16 in the paper.
        beta_1: beta_1 of the inner optimizer, in (0, 1).
        beta_2: beta_2 of the inner optimizer, in (0, 1).
        epsilon: epsilon of the inner optimizer, at least 0.

    Raises:
        ValueError: If an argument is out of range; the message names it.

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
            # Each total is a mean from one worker, which has checked it for overflow
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
        """Return the method itself, because it serves all tensors."""
        return self

    @override
    def describe(self, spec: TensorSpec) -> str:
        begin = f"step {self.start:,}" if self.start >= 1 else f"{self.start:.4g} of `fit`"
        return (
            f"signs and two means of Adam's momentum in both phases; from {begin} on at most "
            f"every {self.steps} steps"
        )

    @override
    def init(self, layout: BucketLayout) -> State:
        numbers = {"updates": [tf.zeros([])], "rates": [tf.zeros([])]}
        return {**super().init(layout), **numbers}

    @override
    def dense_exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        """Run a dense step, which updates momentum and variance."""
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

    @override
    def momentum_exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        """Run a synchronous step in one bit with a constant variance; its totals are momenta."""
        workers = ctx.layout.workers
        local_momenta = [
            self.beta_1 * m / workers + (1.0 - self.beta_1) * g
            for m, g in zip(state["momentum"], feedback.scaled(grads, ctx.scale), strict=True)
        ]
        momenta, left = yield from seen_sum(local_momenta, _seen_masks(state), state, ctx)
        return momenta, {**state, "momentum": momenta, **left}

    @override
    def local_step(self, totals: list[tf.Tensor], state: State) -> tuple[list[tf.Tensor], State]:
        """Run a local step, in which the momentum follows the gradient of this worker."""
        momenta = [
            tf.where(s, m, 0.0 * m)
            for s, m in zip(_seen_masks(state), self._momenta(state, totals), strict=True)
        ]
        return momenta, {**state, "momentum": momenta}

    @override
    def rate_of_step(self, rate: tf.Tensor, steps: tf.Tensor) -> tf.Tensor:
        """Return the factor of m / p in the update of Adam."""
        return rate / (1.0 - self.beta_1**steps)

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        """Run the exchange at the end of a round; `grads` are the weight changes divided by K."""
        (rates,) = yield AllReduce([state["rates"][0] / ctx.layout.workers])
        scales = [tf.sqrt(v) + self.epsilon for v in state["variance"]]
        over_rates = tf.math.divide_no_nan(1.0, rates)  # keeps non-finite gradients so
        local_momenta = [-p * d * over_rates for p, d in zip(scales, grads, strict=True)]
        momenta, left = yield from seen_sum(local_momenta, _seen_masks(state), state, ctx)
        moved = [tf.math.divide_no_nan(-rates * m, p) for m, p in zip(momenta, scales, strict=True)]
        return moved, {**state, "momentum": momenta, "rates": [tf.zeros([])], **left}

    def _momenta(self, state: State, grads: list[tf.Tensor]) -> list[tf.Tensor]:
        return [
            self.beta_1 * m + (1.0 - self.beta_1) * g
            for m, g in zip(state["momentum"], grads, strict=True)
        ]


def seen_sum(
    summands: list[tf.Tensor], seen: list[tf.Tensor], state: State, ctx: Context
) -> Exchange:
    """Sum as `OneBitSGD` does where elements are `seen`; the others are 0, and in no mean.

    Args:
        summands: The summands of this worker.
        seen: Bool masks of the same shapes, equal on all workers.
        state: State of this worker, with a `residual`.
        ctx: Context of the bucket.

    Returns:
        The sums, and a state with the new residuals.
    """
    # `0.0 * x` instead of 0, so that non-finite values are detected
    masked = [
        e + tf.where(s, x, 0.0 * x)
        for e, s, x in zip(state["residual"], seen, summands, strict=True)
    ]
    sums, new = yield from one_bit_sum(masked, ctx, seen)
    totals, left = (
        [tf.where(s, x, 0.0) for s, x in zip(seen, tensors, strict=True)]
        for tensors in (sums, new["residual"])
    )
    return totals, {"residual": left}


def _seen_masks(state: State) -> list[tf.Tensor]:
    """Return masks of the elements that had a gradient in a dense step."""
    return [v > 0.0 for v in state["variance"]]
