"""Random-k and random block: selections that are equal on all workers."""

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
    """Base class: an all-reduce of the elements that `choose` selects."""

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
            # Totals are results of the all-reduce, and zeros
            totals_may_overflow=False,
            # Messages have no positions
            sends_selected=False,
        )

    def choose(self, spec: TensorSpec, seed: tf.Tensor) -> tf.Tensor:
        """Return the positions to send, int64 `[k]`, distinct in the flat tensor.

        Not int32, which would move to host memory.

        Args:
            spec: The tensor.
            seed: int32 `[2]`, equal on all workers.
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
        places = [at[:, tf.newaxis] for at in chosen]
        values = [tf.gather_nd(v, at) for v, at in zip(sends, places, strict=True)]
        sums, errors = yield from all_reduce(ctx, propagate_nonfinite(values, sends))
        totals, residuals = [], []
        for spec, send, at, total, error in zip(specs, sends, places, sums, errors, strict=True):
            totals.append(tf.reshape(tf.scatter_nd(at, total, [spec.size]), spec.shape))
            residual = tf.tensor_scatter_nd_update(send, at, error)
            residuals.append(tf.reshape(residual, spec.shape))
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
            drawn from (seed, step, tensor), equal on all workers, so no index is sent
        total[S] = sum over workers of v[S]             one all-reduce for all tensors
        v[S] <- 0

    Differences from the paper

    * The values are not scaled by n / k, since error feedback sends the other elements later.
    * Elements are drawn without replacement, by sorting random numbers.

    Args:
        density: Fraction of the elements that is sent, in (0, 1].
        seed: Seed of the selection, equal on all workers.
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: If an argument is out of range; the message names it.
    """

    @override
    def choose(self, spec: TensorSpec, seed: tf.Tensor) -> tf.Tensor:
        """Return k distinct random positions."""
        draws, k = uniform([spec.size], seed), element_count(self.density, spec.size)
        return tf.cast(tf.math.top_k(draws, k, sorted=False)[1], tf.int64)


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomBlock(_SharedRandom):
    """Random block: all workers send the same contiguous elements of each tensor.

    Negar Foroutan Eghlidi, Martin Jaggi (2020), "Sparse Communication for Training Deep Networks",
    arXiv 2009.09271. It is also a baseline in Thijs Vogels, Sai Praneeth Karimireddy, Martin Jaggi
    (2019), "PowerSGD", NeurIPS.

    On every worker, with gradient g and residual v, for each tensor of n elements:

        v <- v + g
        S = k contiguous elements, with wrap-around, from a random start,
            drawn from (seed, step, tensor), equal on all workers, so no index is sent
        total[S] = sum over workers of v[S]             one all-reduce for all tensors
        v[S] <- 0

    Differences from the paper

    * The values are not scaled by n / k, since error feedback sends the other elements later.

    This is faster than random-k, since memory access is contiguous. Use a moderate density: an
    element stays in the residual for about 1 / density steps.

    Args:
        density: Fraction of the elements that is sent, in (0, 1].
        seed: Seed of the selection, equal on all workers.
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: If an argument is out of range; the message names it.
    """

    @override
    def choose(self, spec: TensorSpec, seed: tf.Tensor) -> tf.Tensor:
        """Return k contiguous positions from a random start, with wrap-around."""
        k, size = element_count(self.density, spec.size), spec.size
        # A random integer would need a non-empty range, but the size may be 0.
        start = tf.cast(uniform([], seed, tf.float64) * size, tf.int64)
        return (start + tf.range(k, dtype=tf.int64)) % max(size, 1)
