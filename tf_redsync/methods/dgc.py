"""Deep Gradient Compression."""

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

MIN_SELECTED_SAMPLES = 10  # elements of the sample above the threshold


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class DGC(MomentumCorrected):
    """Deep Gradient Compression: top-k by a threshold from a sample, with corrected momentum.

    Yujun Lin, Song Han, Huizi Mao, Yu Wang, William J. Dally (2018), "Deep Gradient Compression:
    Reducing the Communication Bandwidth for Distributed Training", ICLR, arXiv 1712.01887.

    For every large tensor, on every worker, with gradient g, velocity u, residual v, momentum m:

        g <- g * min(1, clip_norm P^(-1/2) / ||g||)     local clipping, over all tensors, P workers
        u <- m u + g                                momentum correction (Nesterov: u <- m (u + g))
        v <- v + u                                  accumulate          (Nesterov: v <- v + u + g)
        t  = smallest of the largest k/n of a sample of |v|
        t <- 0.8 t, at most 10 times, while fewer than 0.8 k elements reach it
        S  = the elements with |v| >= t; if these are more than k, the k largest of them
        message = [indices of S, values v[S]]           one all-gather for a whole bucket of tensors
        v[S] <- 0,  u[S] <- 0                           residual and momentum factor masking
        total = sum over workers of the messages        scatter-add, rank by rank

    The sample is every s-th element from a random start, s odd, so that it does not follow the rows
    of a matrix. In the first epochs the density falls stage by stage (`ExponentialWarmUp`).

    Differences from the paper

    * A message holds k elements, so all that pass are compared exactly as soon as they are more
      than k. The authors' code does so from 1.3 k on, and below that sends the first k.
    * A sample has at least `10 / density` elements, so that no single one decides about a small
      tensor.
    * Here the exact selection is one native pass over memory, and the count of what reaches the
      threshold takes another: `TopK`'s and `RedSync`'s selection is the faster one.
    * The weight decay is the inner optimizer's, applied after the exchange.

    Args:
        density: Fraction of a tensor's elements that is sent at most, in (0, 1]. A tensor of n
            elements sends up to k = max(1, round(density n)).
        momentum: m of the momentum correction, in [0, 1). The inner optimizer must then have none.
        nesterov: Nesterov's form of the momentum.
        masking: Clear the velocity where a value was sent (momentum factor masking). `None`: below
            a density of 10 %. The final one counts: in the stages of
            `ExponentialWarmUp` it is on, as in the paper. See `RedSync` for figures.
        clip_norm: Clip each worker's whole gradient to `clip_norm / sqrt(workers)` before it is
            accumulated. `None` for no clipping. Keeps communication from overlapping with the
            backward pass, since it needs all gradients.
        warm_up: `ExponentialWarmUp(steps_per_stage)` as in the paper, `DenseWarmUp(steps)` or
            `None`.
        sample_ratio: Fraction of a tensor's elements that is sampled, in (0, 1].
        lower_bound: The threshold is lowered while fewer than this fraction of k reach it, and by
            this factor; in (0, 1).
        max_adaptations: Number of times that the threshold is lowered at most.
        seed: Of the sample's start; the same on all workers.
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: for a hyper-parameter out of its range.

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
            "DGC without a warm-up: the paper's density falls in its first epochs, as with "
            "warm_up=ExponentialWarmUp(steps_per_stage=steps_per_epoch)",
        )

    @override
    def describe(self, spec: TensorSpec) -> str:
        return f"threshold from {self.sample_size(spec)} of {spec.size} elements"

    def stride(self, spec: TensorSpec) -> int:
        """Distance between two sampled elements, an odd number."""
        wanted = max(self.sample_ratio * spec.size, MIN_SELECTED_SAMPLES / self.density)
        stride = int(spec.size / wanted)
        return max(1, stride - 1 + stride % 2)

    def sample_size(self, spec: TensorSpec) -> int:
        """Number of elements that are sampled."""
        return spec.size // self.stride(spec)

    def sample(self, spec: TensorSpec, draw: tf.Tensor) -> tf.Tensor:
        """Return the positions of the sampled elements in the flat tensor, int64 `[sample_size]`.

        Args:
            spec: The tensor.
            draw: float32 scalar in [0, 1) that decides where to start.
        """
        stride = self.stride(spec)
        start = tf.minimum(tf.cast(draw * stride, tf.int32), stride - 1)
        return tf.cast(start, tf.int64) + stride * tf.range(self.sample_size(spec), dtype=tf.int64)

    def draw(self, step: tf.Tensor) -> tf.Tensor:
        """Return the random number of a step, for `sample`."""
        return uniform([], stream(self.seed, step, -1))

    def threshold(
        self, spec: TensorSpec, magnitudes: tf.Tensor, k: int | tf.Tensor, draw: tf.Tensor
    ) -> tf.Tensor:
        """Return the threshold that about `k` elements reach, a float32 scalar >= 0.

        Args:
            spec: The tensor, of at least one element.
            magnitudes: |v|, float32 `[n]`.
            k: int or int64 scalar. If it is n, all elements reach the threshold.
            draw: See `sample`.
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
        return selected_payloads(MessageLayout.of(self.counts(layout)))

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
        """The threshold of every tensor, float32 `[tensors]`."""
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
