"""Unbiased sparsification with minimal variance."""

from __future__ import annotations

import dataclasses

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.config import register
from tf_redsync.exchange import feedback
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import TensorSpec
from tf_redsync.exchange.method import Exchange, State
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.random_numbers import stream, uniform, worker_seed
from tf_redsync.methods.common.sparsifier import Sparsifier, capacity, deliver, element_count
from tf_redsync.ops import MessageLayout, Selection, wire
from tf_redsync.ops.wire import padded

ROUNDS = 4  # maximum; two are enough in the paper


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Wangni(Sparsifier):
    """Wangni: unbiased sparsification with the least variance for a number of elements.

    Jianqiao Wangni, Jialei Wang, Ji Liu, Tong Zhang (2018), "Gradient Sparsification for
    Communication-Efficient Distributed Optimization", NeurIPS, arXiv 1710.09854, algorithm 3.

    On every worker, for each tensor g of n elements and density rho, element i is sent with
    probability p_i and divided by p_i. p_i is in proportion to the magnitude of the element:

        p  <- min(rho n |g| / sum |g|, 1)
        repeat:  I = elements with p < 1,  c = (rho n - n + |I|) / sum p[I],  stop if c <= 1
                 p[I] <- min(c p[I], 1)
        S  = element i with probability p_i
        message = [indices of S, values g[S] / p[S]]            one all-gather
        total = sum over workers of the messages

    The total is unbiased, with rho n elements of each worker on average. Its variance, sum g^2 (1 /
    p - 1), is the least for sum p = rho n. The method is stateless.

    Differences from the paper

    * Systematic sampling: with one u, uniform in [0, 1), the method sends the elements at which u
      plus the running sum of p passes an integer. Each is sent with its probability, but their
      number is sum p rounded up or down in every step, not just on average. So messages have a
      fixed length and never overflow.
    * The sent values of the elements I with p < 1 have one magnitude, |g_i| / p_i =
      sum |g[I]| / (rho n - n + |I|). The message has it for each of them, and `Coded` shortens it.
      The error of the codes stays in a residual and is added to the next gradient.
    * Biases, norms and small tensors are all-reduced densely.

    Args:
        density: Fraction of the elements that is sent, in (0, 1].
        seed: Seed of the sampling, the same on all workers; each worker draws different numbers.
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: If an argument is out of range; the message names it.

    Example:
        >>> Wangni(density=0.05).traits.conserves
        False
    """

    seed: int = 0

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer("seed", self.seed, low=0)

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Wangni, Wang, Liu, Zhang 2018",
            requests="all-gather of indices and values",
            bits="64 density",
            state_kinds={},  # `Coded` adds a residual
            # No residual for rounding errors
            rounds_values=False,
            # Unbiased, but not conserved in each step
            conserves=False,
            # No element is delayed
            waiting_steps=1.0,
        )

    @override
    def describe(self, spec: TensorSpec) -> str:
        return f"{self.k(spec)} random elements"

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        grads, residuals = feedback.scaled(grads, ctx.scale), state.get("residual")
        if residuals is not None:
            grads = [v + g for v, g in zip(residuals, grads, strict=True)]
        parts, capacities = [], []
        for spec, grad in zip(ctx.layout.specs, grads, strict=True):
            seed = worker_seed(stream(self.seed, ctx.step, spec.position), ctx.rank)
            # One slot more than the sum of the probabilities, which may be rounded up.
            capacities.append(capacity(self.k(spec) + 1, spec.size))
            u = uniform([], seed, tf.float64)
            parts.append(_part(tf.reshape(grad, [-1]), self.density, u, capacities[-1]))
        counts, indices, values = zip(*parts, strict=True)
        layout = MessageLayout.of(capacities)
        # A finite element over a small probability may overflow.
        finite = wire.all_finite([*grads, *values])
        message = layout.message(finite, tf.stack(counts), indices, values)
        nothing = [tf.zeros_like(g) for g in grads]
        selection = Selection(message, nothing, [], tf.zeros([len(capacities)]), layout)
        totals, left_out = yield from deliver(ctx, selection)
        return totals, state if residuals is None else {"residual": left_out}


def probabilities(grad: tf.Tensor, count: int) -> tf.Tensor:
    """Return the probabilities of a flat gradient's elements, float64 `[n]`.

    Their sum is `count`, or the number of non-zero elements if that is smaller.
    """
    size = grad.shape[0]
    if count >= size:
        return tf.ones([size], tf.float64)
    magnitudes = tf.abs(tf.cast(grad, tf.float64))

    def more(factor: tf.Tensor) -> tf.Tensor:
        """Return c for probabilities min(factor |g|, 1)."""
        others = factor * magnitudes < 1.0
        rest = count - size + tf.math.count_nonzero(others)
        total = factor * tf.reduce_sum(tf.where(others, magnitudes, 0.0))
        return tf.maximum(tf.math.divide_no_nan(tf.cast(rest, tf.float64), total), 1.0)

    factor = tf.math.divide_no_nan(tf.constant(count, tf.float64), tf.reduce_sum(magnitudes))
    # Rarely more than one or two rounds, because few elements have a probability of 1.
    _, factor, c = tf.while_loop(
        lambda number, factor, c: (number < ROUNDS) & (c > 1.0),
        lambda number, factor, c: (number + 1, factor * c, more(factor * c)),
        (tf.constant(1), factor, more(factor)),
        parallel_iterations=1,
    )
    return tf.minimum(factor * c * magnitudes, 1.0)


def sampled(p: tf.Tensor, u: tf.Tensor) -> tf.Tensor:
    """Return a mask of the sampled elements.

    Args:
        p: Probabilities, float64 `[n]`.
        u: Uniform in [0, 1), float64 scalar, or `[draws, 1]` for several draws.

    Returns:
        bool `[n]`, or `[draws, n]`.
    """
    whole = tf.floor(tf.cumsum(p) + u)
    before = tf.concat([tf.zeros_like(whole[..., :1]), whole[..., :-1]], axis=-1)
    passed = whole > before
    return passed & (p > 0.0) | (p >= 1.0)


def _part(
    grad: tf.Tensor, density: float, u: tf.Tensor, slots: int
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return count, indices and values of the message for one tensor."""
    p = probabilities(grad, element_count(density, grad.shape[0]))
    at = tf.where(sampled(p, u))[:slots, 0]
    true = tf.cast(tf.gather(grad, at), tf.float64)
    values = tf.cast(true / tf.gather(p, at), tf.float32)
    count, padding = tf.size(at), [[0, slots - tf.size(at)]]
    indices = padded(tf.cast(at, tf.int32), slots)
    return count, indices, tf.ensure_shape(tf.pad(values, padding), [slots])
