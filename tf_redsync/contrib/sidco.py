"""SIDCo: a threshold from a distribution fitted to the gradient."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks, ops
from tf_redsync.config import register
from tf_redsync.exchange import feedback
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.method import Exchange, State
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.sparsifier import Sparsifier, capacity, deliver, element_count

DISTRIBUTIONS = ("exponential", "gamma", "generalized_pareto")
FIRST_RATIO = 0.25  # fraction of the elements that passes the first of several stages
TOLERANCE = 0.2  # relative error of the achieved number of elements before a stage is added
SLACK = 2  # slots of a message for each target element


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class SIDCo(Sparsifier):
    """SIDCo: a threshold from a distribution fitted to the gradient.

    Ahmed M. Abdelmoniem, Ahmed Elzanaty, Mohamed-Slim Alouini, Marco Canini (2021), "An Efficient
    Statistical-based Gradient Compression Technique for Distributed Training Systems", MLSys, arXiv
    2101.10761.

    On every worker, with gradient g, residual v and density d, for each tensor of n elements:

        v <- v + g,  a = |v|,  t = 0
        for m = 1 .. M:                                 peaks over threshold
            x = {a_j - t : a_j > t}
            r = (target number of elements after stage m) / (number of x)
            t <- t + F^-1(1 - r)                        F fitted to x by its moments
        S = {|v| >= t};  message = [indices of S, values v[S]];  v[S] <- 0
        total = sum over workers of the messages        one all-gather for a whole bucket of tensors

    The target is n / 4 elements after the first stage and n d after the last one; in between it
    falls by equal factors. F, with mean mu and variance s^2 of x:

        exponential         F^-1(1 - r) = -mu ln r
        generalised Pareto  k = (mu^2/s^2 - 1) / 2, alpha = mu (mu^2/s^2 + 1) / 2,
                            F^-1(1 - r) = alpha (1 - r^k) / k
        gamma               shape and scale from mu and the mean of ln x; first stage only, then
                            generalised Pareto

    Every `adapt_every` steps a tensor gets another stage if its number of elements with |v| >= t
    was on average off by more than 20 %.

    Differences from the paper

    * A stage counts the elements above the last threshold instead of trusting the fit, so it
      corrects the error of the stage before. More stages are then better for all tails. The paper
      removes a stage if too many elements pass, which makes heavy tails worse.
    * Training starts with two stages instead of one.
    * Messages have a capacity of `2 d n` elements. If more reach the threshold, the largest are
      sent and the others stay in the residual. If none does (a constant tensor), the largest
      `2 d n` are sent.

    Args:
        density: Target fraction of the elements, in (0, 1]. A message has capacity for twice as
            many.
        distribution: `"exponential"`, `"gamma"` or `"generalized_pareto"`, according to the tails
            of the gradient; the last one needs the fewest stages.
        adapt_every: Steps between two adaptations of the number of stages.
        dense_below: Tensors of fewer float32 bytes are all-reduced densely. Fits to fewer than a
            thousand elements are poor.

    Raises:
        ValueError: If an argument is out of range; the message names it.

    Example:
        >>> SIDCo(density=0.001, distribution="exponential").max_stages(1_000_000)
        10
    """

    distribution: str = "generalized_pareto"
    adapt_every: int = 5

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        checks.choice("distribution", self.distribution, DISTRIBUTIONS)
        checks.integer("adapt_every", self.adapt_every, low=1)

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Abdelmoniem, Elzanaty, Alouini, Canini 2021",
            requests="all-gather of indices and values",
            bits="128 density",
            state_kinds={"residual": "sum", "stages": "mean"},
        )

    @override
    def describe(self, spec: TensorSpec) -> str:
        return f"{self.distribution}, about {element_count(self.density, spec.size)} elements"

    def max_stages(self, size: int) -> int:
        """Return the maximum number of stages for `size` elements; each must halve their number."""
        target = element_count(self.density, size)
        return max(2, math.ceil(math.log2(size / target))) if target else 2

    @override
    def init(self, layout: BucketLayout) -> State:
        """Return for each tensor: stages, sum of achieved over target numbers, number of terms."""
        start = tf.constant([2.0, 0.0, 0.0])
        return {**super().init(layout), "stages": [start for _ in layout.specs]}

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        sums = feedback.accumulated(
            state["residual"], feedback.scaled(grads, ctx.scale), [], 0.0, False
        )
        thresholds, stages = [], []
        for spec, v, fit in zip(ctx.layout.specs, sums, state["stages"], strict=True):
            magnitudes = tf.reshape(tf.abs(v), [-1])
            threshold, reached = self.threshold(spec.size, magnitudes, fit[0])
            thresholds.append(tf.where(reached > 0.0, threshold, 0.0))
            stages.append(self.adapted(spec.size, fit, reached))
        capacities = [capacity(SLACK * self.k(s), s.size) for s in ctx.layout.specs]
        selection = ops.accumulate_and_select(
            grads,
            state["residual"],
            [],
            capacities,
            tf.stack(thresholds),
            selectors="fixed",
            scale=ctx.scale,
        )
        totals, residuals = yield from deliver(ctx, selection)
        return totals, {"residual": residuals, "stages": stages}

    def threshold(
        self, size: int, magnitudes: tf.Tensor, stages: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the threshold that about `density * size` elements reach, and their number.

        Args:
            size: n, the number of elements.
            magnitudes: a, float32 `[n]`.
            stages: M, float32 scalar.

        Returns:
            Two float32 scalars.
        """
        if size == 0:
            return tf.constant(0.0), tf.constant(0.0)
        target = element_count(self.density, size)
        largest = tf.reduce_max(magnitudes)
        # Scaled, so that squares neither overflow nor underflow.
        scaled = tf.math.divide_no_nan(magnitudes, largest)
        first = max(FIRST_RATIO * size, target)
        quantile = gamma if self.distribution == "gamma" else self._quantile
        threshold = _next_threshold(
            scaled, tf.constant(0.0), tf.constant(first, tf.float32), quantile
        )
        if first > target:
            tail = _values_above(scaled, threshold)

            def stage(number: tf.Tensor, threshold: tf.Tensor) -> list[tf.Tensor]:
                left = first * (target / first) ** (number / (tf.round(stages) - 1.0))
                return [number + 1.0, _next_threshold(tail, threshold, left, self._quantile)]

            _, threshold = tf.while_loop(
                lambda number, _: number < tf.round(stages), stage, [tf.constant(1.0), threshold]
            )
        threshold *= largest
        reached = (magnitudes >= threshold) & (magnitudes > 0.0)
        return threshold, tf.cast(tf.math.count_nonzero(reached), tf.float32)

    def _quantile(self, excess: tf.Tensor, ratio: tf.Tensor, mean: tf.Tensor) -> tf.Tensor:
        """Return the quantile of the distribution in the stages after the first."""
        fit = exponential if self.distribution == "exponential" else generalized_pareto
        return fit(excess, ratio, mean)

    def adapted(self, size: int, fit: tf.Tensor, reached: tf.Tensor) -> tf.Tensor:
        """Return the new `(stages, sum of achieved over target, number of terms)` of a tensor."""
        stages, achieved, terms = tf.unstack(fit)
        achieved += reached / max(1, element_count(self.density, size))
        terms += 1.0
        due = terms >= self.adapt_every
        off = due & (tf.abs(achieved / terms - 1.0) > TOLERANCE)
        stages = tf.where(off, tf.minimum(stages + 1.0, self.max_stages(size)), stages)
        return tf.stack([stages, tf.where(due, 0.0, achieved), tf.where(due, 0.0, terms)])


def _values_above(values: tf.Tensor, threshold: tf.Tensor) -> tf.Tensor:
    """Return the elements of `values` `[n]` that are above the threshold."""
    return tf.gather(values, tf.reshape(tf.where(values > threshold), [-1]))


def _next_threshold(
    values: tf.Tensor, threshold: tf.Tensor, target: tf.Tensor, quantile: Any
) -> tf.Tensor:
    """Return the threshold that about `target` of `values` `[n]` reach, fitted to the excess."""
    excess = _values_above(values, threshold) - threshold
    count = tf.cast(tf.size(excess), tf.float32)
    ratio = tf.minimum(1.0, tf.math.divide_no_nan(target, count))
    mean = tf.math.divide_no_nan(tf.reduce_sum(excess), count)
    return threshold + tf.where(ratio > 0.0, quantile(excess, ratio, mean), 0.0)


def exponential(excess: tf.Tensor, ratio: tf.Tensor, mean: tf.Tensor) -> tf.Tensor:
    """Return the value that a fraction `ratio` exceeds under an exponential fit, a scalar.

    Args:
        excess: float32 `[n]`, values above 0.
        ratio: float32 scalar in (0, 1].
        mean: Mean of `excess`.
    """
    del excess
    return -mean * tf.math.log(ratio)


def generalized_pareto(excess: tf.Tensor, ratio: tf.Tensor, mean: tf.Tensor) -> tf.Tensor:
    """Return the same as `exponential` under a generalised Pareto fit by mean and variance."""
    variation = tf.reduce_mean(tf.square(tf.math.divide_no_nan(excess, mean) - 1.0))  # s^2 / mu^2
    inverse = 1.0 / tf.maximum(variation, 1e-6)
    k, alpha = 0.5 * (inverse - 1.0), 0.5 * mean * (inverse + 1.0)
    k = tf.where(tf.abs(k) < 1e-4, 1e-4, k)  # the limit k = 0 is the exponential
    return -alpha * tf.math.expm1(k * tf.math.log(ratio)) / k


def gamma(excess: tf.Tensor, ratio: tf.Tensor, mean: tf.Tensor) -> tf.Tensor:
    """Return the same as `exponential` under a gamma fit by mean and mean logarithm."""
    s = tf.maximum(tf.math.log(mean) - tf.reduce_mean(tf.math.log(excess)), 1e-3)
    shape = (3.0 - s + tf.sqrt(tf.square(s - 3.0) + 24.0 * s)) / (12.0 * s)
    low, width = tf.constant(0.0), 2.0 * shape + 60.0
    for _ in range(3):  # refine the quantile of the gamma distribution of scale 1 by 256
        width = width / 256.0
        grid = low + width * tf.range(1.0, 257.0)
        above = tf.math.count_nonzero(tf.math.igammac(shape, grid) > ratio)
        low += width * tf.cast(above, tf.float32)
    return mean / shape * (low + 0.5 * width)
