"""Momentum correction, factor masking, local clipping and warm-up of sparsifiers."""

from __future__ import annotations

import dataclasses

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.exchange import feedback
from tf_redsync.exchange.capabilities import Clipping
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout
from tf_redsync.exchange.method import Exchange, Method, State
from tf_redsync.exchange.requests import AllReduce
from tf_redsync.exchange.sync_schedule import SyncSchedule
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.sparsifier import Sparsifier, element_count
from tf_redsync.methods.dense import Dense, MomentumInExchange
from tf_redsync.schedules import (
    DenseWarmUp,
    ExponentialWarmUp,
    check_warm_up,
    dense_steps,
    density_at,
)

MASKED_BELOW = 0.1  # density; see `MomentumCorrected.masks`


@dataclasses.dataclass(frozen=True, kw_only=True)
class MomentumCorrected(Clipping, MomentumInExchange, Sparsifier):
    """A sparsifier with momentum correction: the residual accumulates velocities.

    Args:
        density: Fraction of a tensor's elements that is sent, in (0, 1].
        momentum: m of the momentum correction, in [0, 1). The inner optimizer must then have none.
        nesterov: Whether to use Nesterov momentum.
        masking: Clear the velocity of sent elements (momentum factor masking). `None`: below a
            density of 10 %; see `masks`.
        clip_norm: Clip each worker's whole gradient to `clip_norm / sqrt(workers)` before it is
            accumulated. `None` for no clipping.
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.
        warm_up: `None`, `DenseWarmUp(steps)` or `ExponentialWarmUp(steps_per_stage)`.

    Reference:
        Lin, Han, Mao, Wang, Dally (2018), "Deep Gradient Compression", section 3.
    """

    density: float = 0.001
    momentum: float = 0.0
    nesterov: bool = False
    masking: bool | None = None
    clip_norm: float | None = None
    warm_up: DenseWarmUp | ExponentialWarmUp | None = None

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        checks.momentum(self.momentum, self.nesterov)
        if self.masking is not None:
            checks.boolean("masking", self.masking)
        if self.clip_norm is not None:
            checks.positive("clip_norm", self.clip_norm)
        check_warm_up(self.warm_up, DenseWarmUp, ExponentialWarmUp)

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            state_kinds={"residual": "sum", "velocity": "sum"},
            # Values in messages are bounded
            totals_may_overflow=False,
            density_changes=isinstance(self.warm_up, ExponentialWarmUp),
        )

    @property
    def masks(self) -> bool:
        """Whether velocities of sent elements are cleared: `masking`, or a default by density.

        Masking removes the momentum of elements that are sent often; at density 1, of all. From
        a density of `MASKED_BELOW` on, it loses more accuracy than it gains. The final density
        decides, also during an `ExponentialWarmUp`, as in the DGC paper.
        """
        return self.density < MASKED_BELOW if self.masking is None else self.masking

    @property
    @override
    def sync_schedule(self) -> SyncSchedule:
        return SyncSchedule(warm_up_steps=dense_steps(self.warm_up))

    @override
    def dense(self) -> Method:
        return Dense(momentum=self.momentum, nesterov=self.nesterov)

    @override
    def clip_scale(self, grads: list[tf.Tensor], workers: int) -> tf.Tensor | None:
        norm = self.clip_norm
        return None if norm is None else feedback.local_clip_scale(grads, norm, workers)

    @override
    def init(self, layout: BucketLayout) -> State:
        zeros = [tf.zeros(s.shape, tf.float32) for s in layout.specs]
        return {"residual": zeros, "velocity": list(zeros) if self.momentum else []}

    @override
    def dense_exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        """All-reduce the momentum-corrected gradients, and update velocities as `exchange` does."""
        grads, u = feedback.scaled(grads, ctx.scale), state["velocity"]
        contributions, velocity = feedback.momentum_step(grads, u, self.momentum, self.nesterov)
        totals = yield AllReduce(contributions)
        return totals, {**state, "velocity": velocity}

    def _k(self, layout: BucketLayout, step: tf.Tensor) -> list[int] | tf.Tensor:
        """Return the number of elements to send of each tensor at `step`.

        Python ints, or int32 `[tensors]` if they depend on a step that is symbolic in the trace.
        """
        ramp = self.warm_up
        if not isinstance(ramp, ExponentialWarmUp):
            return self.capacities(layout)
        stages = ramp.stages(self.density)
        known = tf.get_static_value(step)
        if known is not None:
            return [element_count(density_at(stages, int(known)), s.size) for s in layout.specs]
        # Counts are rounded in Python for each stage, so that all workers have equal integers.
        counts = [[element_count(density, s.size) for s in layout.specs] for _, density in stages]
        begun = tf.cast(step >= tf.constant([begin for begin, _ in stages], tf.int64), tf.int32)
        return tf.constant(counts, tf.int32)[tf.reduce_sum(begun) - 1]
