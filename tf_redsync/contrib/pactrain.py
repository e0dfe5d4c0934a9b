"""PacTrain: all-reduce of the gradients of unpruned weights."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.config import register
from tf_redsync.exchange import feedback
from tf_redsync.exchange.capabilities import Masked, Waiting
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.method import Exchange, Method, State
from tf_redsync.exchange.requests import AllReduce
from tf_redsync.exchange.sync_schedule import SyncSchedule
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.quantizer import largest
from tf_redsync.methods.common.random_numbers import worker_stream
from tf_redsync.methods.common.sparsifier import (
    DENSE_BELOW,
    kept_elements,
    propagate_nonfinite,
    too_small,
)
from tf_redsync.methods.common.ternary_all_reduce import deliver_ternary
from tf_redsync.methods.dense import Dense

# Values of the state `stable` other than a number of steps.
NO_MASK, TOO_MANY_KEPT = -1, -2


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class PacTrain(Masked, Waiting, Method):
    """PacTrain: all-reduce of the gradients of unpruned weights only.

    It needs pruning: pass `tf_redsync.callbacks.Prune` to `fit`. Exchanges are dense until the
    weights are pruned.

    Yisu Wang, Ruilong Wu, Xinjiao Li, Dirk Kutscher (2025), "PacTrain: Pruning and Adaptive Sparse
    Gradient Compression for Efficient Collective Communication in Distributed Deep Learning", arXiv
    2505.18563.

    A fraction s of each weight matrix is pruned during training. Its mask m, equal on all workers,
    is 1 where a weight is kept and 0 where it is pruned. With a gradient g of n elements, on every
    worker:

        until the mask has been the same for T steps:
            total = m * sum over workers of g                   one all-reduce of 32 n bits
        from then on, with p the positions where m is 1:
            compact = g[p]                                      ceil((1 - s) n) elements
            total[p] = sum over workers of compact              one all-reduce of 32 (1 - s) n bits
            total = 0 elsewhere

    Totals of 0 at pruned weights are the paper's gradient sparsity enforcement: these weights stay
    0. The totals of the kept weights are those of dense exchanges, so there is no residual. Ternary
    values are optional: -c, 0 or c, with c = max |compact| over all workers. They are unbiased, as
    in `TernGrad` with a shared scaler.

    The masks come from `tf_redsync.callbacks.Prune`, or from `optimizer.prune(...)` in a custom
    loop.

    Differences from the paper, of which only the abstract was available

    * The tracker counts the steps since the mask of the weights was set. Zeros in gradients do not
      identify pruned weights: an inactive unit, or an embedding row that no batch contains, has a
      gradient of 0 for a while. A mask from these zeros would drop its later gradients.
    * Workers agree on a mask when it is set, between steps, so the tracker needs no communication
      in a step, and all workers switch in the same step.
    * The user chooses T, when to prune, and whether by layer or over the model.
    * Biases, norms and small tensors are neither pruned nor compressed.

    Args:
        sparsity: s, the minimum pruned fraction of each tensor, in [0, 1). Messages have capacity
            for the rest. If a mask keeps more elements of any tensor, the mask applies, but
            exchanges stay dense, and a warning states a sparsity that fits.
        stable_steps: T, dense steps with the same mask before the first compact one. A value above
            the length of the training gives dense training of the pruned model.
        ternary: Whether values are sent as -1, 0 or 1 times the largest magnitude.
        seed: Seed of the rounding of `ternary`, the same on all workers; each worker draws
            different numbers.
        dense_below: Tensors of fewer float32 bytes are neither pruned nor compressed.

    Raises:
        ValueError: If an argument is out of range; the message names it.

    Example:
        >>> import tf_redsync as rs
        >>> method = rs.contrib.PacTrain(sparsity=0.8)
        >>> prune = rs.callbacks.Prune(0.8, at_step=100)  # model.fit(..., callbacks=[prune])
    """

    sparsity: float = 0.5
    stable_steps: int = 10
    ternary: bool = False
    seed: int = 0
    dense_below: int = DENSE_BELOW

    def __post_init__(self) -> None:
        checks.real("sparsity", self.sparsity, low=0.0, high=1.0, high_open=True)
        checks.integer("stable_steps", self.stable_steps, low=0)
        checks.boolean("ternary", self.ternary)
        checks.integer("seed", self.seed, low=0)
        checks.integer("dense_below", self.dense_below, low=0)

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Wang, Wu, Li, Kutscher 2025",
            requests="all-reduce of values; ternary: all-gather of scalers and all-reduce",
            bits="32 (1 - s); ternary 32 (1 - s) / floor(log(2^25) / log(2 K + 1))",
            state_kinds={
                "mask": "shared",
                "positions": "shared",
                "stable": "shared",
            },
            # Gradients of pruned weights are dropped
            conserves=False,
            # Totals are results of the all-reduce, or integers times the scaler
            totals_may_overflow=self.ternary,
        )

    @property
    @override
    def sync_schedule(self) -> SyncSchedule:
        return SyncSchedule(
            waits_for="the weights to be pruned: pass tf_redsync.callbacks.Prune(sparsity, "
            "at_step=...) to `fit`, or call optimizer.prune(sparsity) in a custom loop"
        )

    @override
    def ready(self, state: State) -> tf.Tensor:
        """Return whether the mask is stable and fits the capacity."""
        return state["stable"][0] >= self.stable_steps

    @override
    def refuses(self, spec: TensorSpec) -> str | None:
        return too_small(spec, self.dense_below)

    @override
    def dense(self) -> Method:
        return Dense()

    @override
    def describe(self, spec: TensorSpec) -> str:
        k = kept_elements(self.sparsity, spec.size)
        return f"once pruned, k = {k:,}" + (", ternary" if self.ternary else "")

    @override
    def init(self, layout: BucketLayout) -> State:
        """Return a state in which all weights are kept; `positions` are placeholders."""
        counts = [kept_elements(self.sparsity, s.size) for s in layout.specs]
        return {
            "mask": [tf.ones(s.shape, tf.bool) for s in layout.specs],
            # int64, because variables of int32 are not placed on GPUs.
            "positions": [tf.range(k, dtype=tf.int64) for k in counts],
            "stable": [tf.constant(NO_MASK, tf.int64)],
        }

    @override
    def with_masks(self, layout: BucketLayout, masks: Sequence[np.ndarray]) -> State:
        """Return the state after pruning, and warn if a mask keeps too many weights.

        Args:
            layout: The bucket.
            masks: For each tensor a bool array of its shape: `True` where weights are kept.
        """
        positions, fits = [], True
        for spec, mask in zip(layout.specs, masks, strict=True):
            flat, capacity = np.ravel(mask), kept_elements(self.sparsity, spec.size)
            kept = np.flatnonzero(flat)
            if kept.size > capacity:
                fits = False
                warnings.warn(
                    f"PacTrain continues with dense exchanges: {kept.size:,} of the {spec.size:,} "
                    f"weights of {spec.name!r} are kept, but sparsity={self.sparsity} has capacity "
                    f"for {capacity:,}. Prune more of this variable, or set `sparsity` to at most "
                    f"{math.floor(1e4 * (1 - kept.size / spec.size)) / 1e4}.",
                    stacklevel=2,
                )
            # If a mask keeps fewer, pruned positions fill the rest, so positions are distinct.
            positions.append(np.concatenate([kept, np.flatnonzero(~flat)])[:capacity])
        return {
            "mask": [tf.convert_to_tensor(m, tf.bool) for m in masks],
            "positions": [tf.convert_to_tensor(p, tf.int64) for p in positions],
            "stable": [tf.constant(0 if fits else TOO_MANY_KEPT, tf.int64)],
        }

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        """Exchange the kept elements; requires that the state is `ready`."""
        grads = feedback.scaled(grads, ctx.scale)
        compact = [
            _gathered(g, m, p)
            for g, m, p in zip(grads, state["mask"], state["positions"], strict=True)
        ]
        values = propagate_nonfinite(compact, grads)
        if self.ternary:
            scalers = tf.concat([largest(v[tf.newaxis]) for v in values], axis=0)
            stream = worker_stream(self.seed, ctx)
            sums = yield from deliver_ternary(values, scalers, stream, ctx.layout.workers)
        else:
            sums = yield AllReduce(values)
        totals = [
            tf.reshape(tf.scatter_nd(p[:, tf.newaxis], t, [spec.size]), spec.shape)
            for spec, t, p in zip(ctx.layout.specs, sums, state["positions"], strict=True)
        ]
        return totals, state

    @override
    def dense_exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        """Exchange densely before the mask is stable, and count the steps since it was set."""
        totals = yield AllReduce(feedback.scaled(grads, ctx.scale))
        masked = [
            tf.where(m, t, tf.zeros_like(t)) for m, t in zip(state["mask"], totals, strict=True)
        ]
        stable = state["stable"][0]
        return masked, {**state, "stable": [tf.where(stable < 0, stable, stable + 1)]}


def _gathered(grad: tf.Tensor, mask: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
    """Return the elements of `grad` at `positions`, 0 where the mask is false."""
    values = tf.gather(tf.reshape(grad, [-1]), positions)
    is_kept = tf.gather(tf.reshape(mask, [-1]), positions)
    return tf.where(is_kept, values, tf.zeros_like(values))
