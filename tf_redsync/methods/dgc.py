"""DGC, deep gradient compression."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks, ops
from tf_redsync.config import register
from tf_redsync.exchange import feedback
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.method import Exchange, Payloads, State
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.momentum_correction import MomentumCorrected
from tf_redsync.methods.common.random_numbers import stream, uniform
from tf_redsync.methods.common.sparsifier import deliver, selected_payloads
from tf_redsync.ops import MessageLayout

MIN_SELECTED_SAMPLES = 10  # smallest number of sampled elements above the threshold


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class DGC(MomentumCorrected):
    """Deep Gradient Compression: top-k by a sampled threshold, with momentum correction.

    Yujun Lin, Song Han, Huizi Mao, Yu Wang, William J. Dally (2018), "Deep Gradient Compression:
    Reducing the Communication Bandwidth for Distributed Training", ICLR, arXiv 1712.01887.

    For every large tensor, on every worker, with gradient g, velocity u, residual v, momentum m:

        g <- g * min(1, clip_norm P^(-1/2) / ||g||)     local clipping, over all tensors, P workers
        u <- m u + g                                momentum correction (Nesterov: u <- m (u + g))
        v <- v + u                                  accumulate          (Nesterov: v <- v + u + g)
        t  = smallest of the top fraction k/n of a sample of |v|
        t <- 0.8 t, at most 10 times, while fewer than 0.8 k elements reach it
        S  = the elements with |v| >= t; the k largest of them if there are more than k
        message = [indices of S, values v[S]]           one all-gather per bucket of tensors
        v[S] <- 0,  u[S] <- 0                           residual and momentum factor masking
        total = sum over workers of the messages        scatter-add, rank by rank

    The sample is every s-th element from a random start. s is odd, so that the sample is not
    aligned with the rows of a matrix. In the first epochs the density decreases in stages
    (`ExponentialWarmUp`).

    Differences from the paper

    * A message has capacity for k elements, so the exact top-k runs as soon as more than k elements
      pass. The authors' code runs it from 1.3 k on, and below that sends the first k.
    * A sample has at least `10 / density` elements, so that the threshold of a small tensor does
      not depend on a single element.
    * The exact selection is one native pass over memory, and counting the elements above the
      threshold takes a second pass. The selections of `TopK` and `RedSync` are faster.
    * The inner optimizer applies weight decay, after the exchange.

    Args:
        density: Largest fraction of a tensor's elements that is sent, in (0, 1]. A tensor of n
            elements sends up to k = max(1, round(density n)).
        momentum: m of the momentum correction, in [0, 1). The inner optimizer must then have none.
        nesterov: Whether to use Nesterov momentum.
        masking: Clear the velocity of sent elements (momentum factor masking). `None`: below a
            density of 10 %. The final density decides, so masking is on in the stages of
            `ExponentialWarmUp`, as in the paper. See `RedSync` for figures.
        clip_norm: Clip the norm of each worker's whole gradient to `clip_norm / sqrt(workers)`
            before it is accumulated. `None`: no clipping. Clipping needs all gradients, so
            communication cannot overlap with the backward pass.
        warm_up: `ExponentialWarmUp(steps_per_stage)` as in the paper, `DenseWarmUp(steps)` or
            `None`.
        sample_ratio: Fraction of a tensor's elements that is sampled, in (0, 1].
        lower_bound: The threshold is multiplied by this factor while fewer than this fraction of k
            elements reach it; in (0, 1).
        max_adaptations: Largest number of times that the threshold is lowered.
        seed: Seed of the sample's start, equal on all workers.
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: If an argument is out of range; the message names it.

    Example:
        >>> import tf_redsync as rs
        >>> method = rs.DGC(density=0.001, warm_up=rs.ExponentialWarmUp(steps_per_stage=390))
    """

    momentum: float = 0.9
    sample_ratio: float = 0.01
    lower_bound: float = 0.8
    max_adaptations: int = 10
    seed: int = 0

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        checks.real("sample_ratio", self.sample_ratio, low=0.0, high=1.0, low_open=True)
        bounds: dict[str, Any] = {"low": 0.0, "high": 1.0, "low_open": True, "high_open": True}
        checks.real("lower_bound", self.lower_bound, **bounds)
        checks.integer("max_adaptations", self.max_adaptations, low=0)
        checks.integer("seed", self.seed, low=0)

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Lin, Han, Mao, Wang, Dally 2018",
            requests="all-gather of indices and values",
            bits="64 density",
            notes=self._notes,
        )

    @property
    def _notes(self) -> tuple[str, ...]:
        if self.warm_up is not None:
            return ()
        return (
            "DGC without a warm-up: the paper decreases the density in the first epochs, as with "
            "warm_up=ExponentialWarmUp(steps_per_stage=steps_per_epoch)",
        )

    @override
    def describe(self, spec: TensorSpec) -> str:
        return f"threshold from {self.sample_size(spec)} of {spec.size} elements"

    def stride(self, spec: TensorSpec) -> int:
        """Return the stride of the sample, an odd number."""
        wanted = max(self.sample_ratio * spec.size, MIN_SELECTED_SAMPLES / self.density)
        stride = int(spec.size / wanted)
        return max(1, stride - 1 + stride % 2)

    def sample_size(self, spec: TensorSpec) -> int:
        """Return the number of sampled elements."""
        return spec.size // self.stride(spec)

    def sample(self, spec: TensorSpec, draw: tf.Tensor) -> tf.Tensor:
        """Return the positions of the sampled elements in the flat tensor, int64 `[sample_size]`.

        Args:
            spec: The tensor.
            draw: Random number that determines the start, float32 scalar in [0, 1).
        """
        stride = self.stride(spec)
        start = tf.minimum(tf.cast(draw * stride, tf.int32), stride - 1)
        return tf.cast(start, tf.int64) + stride * tf.range(self.sample_size(spec), dtype=tf.int64)

    def draw(self, step: tf.Tensor) -> tf.Tensor:
        """Return the random number of a step for `sample`."""
        return uniform([], stream(self.seed, step, -1))

    def threshold(
        self, spec: TensorSpec, magnitudes: tf.Tensor, k: int | tf.Tensor, draw: tf.Tensor
    ) -> tf.Tensor:
        """Return the threshold that about `k` elements reach, a float32 scalar >= 0.

        Args:
            spec: The tensor, of at least one element.
            magnitudes: |v|, float32 `[n]`.
            k: int or int64 scalar. For k = n the threshold is 0.
            draw: As in `sample`.
        """
        sample = tf.gather(magnitudes, self.sample(spec, draw))
        largest = -(-k * self.sample_size(spec) // spec.size)  # k/n of the sample
        first = tf.math.top_k(sample, tf.cast(largest, tf.int32)).values[-1]
        first = tf.where(k < spec.size, first, 0.0)
        wanted = self.lower_bound * tf.cast(k, tf.float64)

        def too_few(threshold: tf.Tensor) -> tf.Tensor:
            reached = tf.math.count_nonzero(magnitudes >= threshold)
            return tf.cast(reached, tf.float64) < wanted

        return tf.while_loop(
            too_few,
            lambda threshold: [self.lower_bound * threshold],
            [first],
            maximum_iterations=self.max_adaptations,
        )[0]

    @override
    def payloads(self, layout: BucketLayout, step: int) -> Payloads:
        return selected_payloads(MessageLayout.of(self.capacities(layout)))

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        k = self._k(ctx.layout, ctx.step)
        counts = k if isinstance(k, list) else tf.unstack(tf.cast(k, tf.int64))
        selection = ops.accumulate_and_select(
            grads,
            state["residual"],
            state["velocity"],
            k,
            self._thresholds(
                ctx.layout, feedback.scaled(grads, ctx.scale), state, counts, ctx.step
            ),
            selectors="fixed",
            momentum=self.momentum,
            nesterov=self.nesterov,
            masking=self.masks,
            scale=ctx.scale,
        )
        totals, residuals = yield from deliver(ctx, selection)
        return totals, {
            "residual": residuals,
            "velocity": list(selection.velocities),
        }

    def _thresholds(
        self,
        layout: BucketLayout,
        grads: list[tf.Tensor],
        state: State,
        k: Sequence[int | tf.Tensor],
        step: tf.Tensor,
    ) -> tf.Tensor:
        """Return the threshold of each tensor, float32 `[tensors]`."""
        velocities, draw, thresholds = state["velocity"], self.draw(step), []
        sums = feedback.accumulated(
            state["residual"], grads, velocities, self.momentum, self.nesterov
        )
        for spec, v, ki in zip(layout.specs, sums, k, strict=True):
            if spec.size == 0:
                thresholds.append(tf.constant(0.0))
            else:
                thresholds.append(self.threshold(spec, tf.reshape(tf.abs(v), [-1]), ki, draw))
        return tf.stack(thresholds)
