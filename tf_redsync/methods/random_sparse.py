"""Random-k and random block: all workers send the same random elements."""

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
from tf_redsync.methods.common.random_numbers import stream, uniform
from tf_redsync.methods.common.rounded_all_reduce import all_reduce
from tf_redsync.methods.common.sparsifier import Sparsifier, element_count, propagate_nonfinite


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SharedRandom(Sparsifier):
    """What random-k and random block share: everything but the choice of the elements."""

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
            paper="Foroutan Eghlidi, Jaggi 2020",
            requests="all-reduce of values",
            bits="32 density",
            # They are what the all-reduce returned, and zeros
            totals_may_overflow=False,
            # Values alone: all workers know the positions
            sends_selected=False,
        )

    def choose(self, spec: TensorSpec, seed: tf.Tensor) -> tf.Tensor:
        """Return the elements to send, int32 `[k]`, distinct positions in the flat tensor.

        Args:
            spec: The tensor.
            seed: int32 `[2]`, the same on all workers.
        """
        raise NotImplementedError

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        sends = [
            tf.reshape(v + g, [-1])
            for v, g in zip(state["residual"], feedback.scaled(grads, ctx.scale), strict=True)
        ]
        specs = ctx.layout.specs
        chosen = [self.choose(s, stream(self.seed, ctx.step, s.position)) for s in specs]
        places = [tf.cast(at, tf.int64)[:, tf.newaxis] for at in chosen]  # GPUs keep these
        values = [tf.gather_nd(v, at) for v, at in zip(sends, places, strict=True)]
        sums, errors = yield from all_reduce(ctx, propagate_nonfinite(values, sends))
        totals, residuals = [], []
        for spec, send, at, total, error in zip(specs, sends, places, sums, errors, strict=True):
            totals.append(tf.reshape(tf.scatter_nd(at, total, [spec.size]), spec.shape))
            kept = tf.tensor_scatter_nd_update(send, at, error)
            residuals.append(tf.reshape(kept, spec.shape))
        return totals, {"residual": residuals}


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomK(_SharedRandom):
    """Random-k: all workers send the same random elements of each tensor.

    Negar Foroutan Eghlidi, Martin Jaggi (2020), "Sparse Communication for Training Deep Networks",
    arXiv 2009.09271.

    On every worker, with gradient g and residual v, for each tensor of n elements:

        v <- v + g
        S = k random elements of n,
            drawn from (seed, step, tensor): the same on all workers, so no index is sent
        total[S] = sum over workers of v[S]             one all-reduce for all tensors
        v[S] <- 0

    Differences from the paper

    * The values are not scaled by n / k: error feedback delivers the rest later, so scaling would
      count it twice.
    * Elements are drawn without repetition, by sorting random numbers.

    Args:
        density: Fraction of the elements that is sent, in (0, 1].
        seed: Of the choice; the same on all workers.
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: for a hyper-parameter out of its range.
    """

    @override
    def choose(self, spec: TensorSpec, seed: tf.Tensor) -> tf.Tensor:
        """Return k distinct random elements."""
        draws = uniform([spec.size], seed)
        return tf.math.top_k(draws, element_count(self.density, spec.size), sorted=False)[1]


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomBlock(_SharedRandom):
    """Random block: all workers send the same elements in a row of each tensor.

    Negar Foroutan Eghlidi, Martin Jaggi (2020), "Sparse Communication for Training Deep Networks",
    arXiv 2009.09271. It is also a baseline in Thijs Vogels, Sai Praneeth Karimireddy, Martin Jaggi
    (2019), "PowerSGD", NeurIPS.

    On every worker, with gradient g and residual v, for each tensor of n elements:

        v <- v + g
        S = k elements in a row, wrapping around, from a random start,
            drawn from (seed, step, tensor): the same on all workers, so no index is sent
        total[S] = sum over workers of v[S]             one all-reduce for all tensors
        v[S] <- 0

    Differences from the paper

    * The values are not scaled by n / k: error feedback delivers the rest later, so scaling would
      count it twice.

    Cheaper than random elements, since memory is read and written in a row. With error feedback
    alone it needs a moderate density: an element waits for about 1 / density steps.

    Args:
        density: Fraction of the elements that is sent, in (0, 1].
        seed: Of the choice; the same on all workers.
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: for a hyper-parameter out of its range.
    """

    @override
    def choose(self, spec: TensorSpec, seed: tf.Tensor) -> tf.Tensor:
        """Return k elements in a row from a random start, wrapping around."""
        k, size = element_count(self.density, spec.size), spec.size
        # Not a random integer: its range must not be empty, and a size may be 0.
        start = tf.cast(uniform([], seed, tf.float64) * size, tf.int64)
        return tf.cast((start + tf.range(k, dtype=tf.int64)) % max(size, 1), tf.int32)
