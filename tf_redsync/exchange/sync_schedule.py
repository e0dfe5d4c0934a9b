"""`SyncSchedule`, a method's declaration of when it exchanges and what.

`step/schedule_choice.py` chooses the class that runs it; the base class is `ExchangeSchedule`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import tensorflow as tf

from tf_redsync.outer import Outer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Intervals:
    """Growing intervals between exchanges; see `tf_redsync/step/zero_one.py`.

    Lu, Li, Zhang, De Sa, He (2022), "Maximizing Communication Efficiency for Large-scale Training
    via 0/1 Adam", arXiv 2202.06009.

    Args:
        dense_double_after: Number of dense steps after which the interval between dense steps
            doubles: 1, 2, 4 steps and so on.
        local_start: Step at which local steps begin and dense steps end; below 1 a fraction of the
            training's steps.
        local_double_after: Number of steps after which the number of local steps in a round
            doubles: 1, 2, 4 and so on; below 1 a fraction of the training's steps.
    """

    dense_double_after: int
    local_start: Any
    local_double_after: Any

    @property
    def of_training(self) -> bool:
        """Whether any interval is a fraction of the training."""
        return min(self.local_start, self.local_double_after) < 1

    def of(self, total: Any) -> Intervals:
        """Return the same intervals in steps, without fractions of the training.

        Args:
            total: The number of steps of the training: an int, or an int64 scalar of a graph.
        """
        return dataclasses.replace(
            self,
            local_start=_steps(self.local_start, total),
            local_double_after=_steps(self.local_double_after, total),
        )

    def dense(self, step: tf.Tensor) -> tf.Tensor:
        """Return whether an int64 `step` is dense, a bool scalar."""
        starts = [self.dense_double_after * (2**distance - 1) for distance in range(32)]
        starts = tf.constant(starts, tf.int64)  # of intervals of 1, 2, 4, ...
        block = tf.reduce_sum(tf.cast(step >= starts, tf.int64)) - 1
        since = step - tf.gather(starts, block)
        return tf.equal(since % tf.bitwise.left_shift(tf.constant(1, tf.int64), block), 0)

    def local(self, step: tf.Tensor) -> tf.Tensor:
        """Return whether an int64 `step` is local, a bool scalar."""
        return step >= self.local_start

    def length(self, step: tf.Tensor, most: int) -> tf.Tensor:
        """Return the number of local steps in a round, an int64 scalar, at most `most`."""
        doubled = tf.clip_by_value((step - self.local_start) // self.local_double_after, 0, 32)
        return tf.minimum(tf.bitwise.left_shift(tf.constant(1, tf.int64), doubled), most)


def _steps(steps: Any, total: Any) -> Any:
    """Return `steps`, or below 1 that fraction of `total`, rounded to at least one step."""
    if steps >= 1:
        return steps
    if isinstance(total, int):
        return max(1, math.floor(steps * total + 0.5))
    return tf.maximum(tf.cast(tf.floor(steps * tf.cast(total, tf.float64) + 0.5), tf.int64), 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyncSchedule:
    """The steps and contents of a method's exchanges; selects the schedule of `step/` that runs.

    By default a method exchanges the gradients of every step, with `Method.exchange`.

    Args:
        warm_up_steps: Number of initial steps that run `dense_exchange` instead of `exchange`.
        dense_every: Interval, in steps, of steps that run `dense_exchange`; 0 for none.
        waits_for: Condition that `exchange` waits for, as text for messages; empty for none. Until
            `Waiting.ready` is true, `dense_exchange` runs.
        phases: Increasing pairs `(until, name)`: before step `until`, the method's generator `name`
            runs instead of `exchange`.
        stages: Increasing steps, at each of which `Staged.at` begins to return another method.
        local_steps: Number of local steps between two exchanges of weight changes; 0 to exchange
            gradients.
        delay: Number of steps between an exchange and the application of its total: 0 or 1, with
            fragments any number.
        own_point: Whether each worker computes its gradients at its own point,
            `EvaluationPoint.point`.
        masks_local_momentum: Whether each worker's optimizer clears its momentum for the elements
            of the weight change that it sent.
        outer: Outer optimizer, a `tf_redsync.outer.Outer`, which applies the mean weight change;
            `None` adds the mean to the weights.
        fragments: Number of fragments of the model that are exchanged in turn, each every
            `local_steps` steps; 0 to exchange the whole model.
        mixing: Weight of the worker's own weights w when a fragment with the exchanged weights W is
            merged: mixing w + (1 - mixing) W.
        intervals: Growing intervals between exchanges, up to `local_steps`, or `None`.
        averages: Names of state of kind `"mean"` that is set to its mean over the workers after
            steps 1, 2, 4, ..., and from `average_every` on after every `average_every` steps.
        average_every: See `averages`; 0 for never.
    """

    warm_up_steps: int = 0
    dense_every: int = 0
    waits_for: str = ""
    phases: tuple[tuple[int, str], ...] = ()
    stages: tuple[int, ...] = ()
    local_steps: int = 0
    delay: int = 0
    own_point: bool = False
    masks_local_momentum: bool = False
    outer: Outer | None = None
    fragments: int = 0
    mixing: float = 0.0
    intervals: Intervals | None = None
    averages: tuple[str, ...] = ()
    average_every: int = 0

    def averages_after(self, steps: tf.Tensor) -> tf.Tensor:
        """Return whether `averages` are taken after int64 `steps` of 1 or more, a bool scalar."""
        doubled = tf.equal(tf.bitwise.bitwise_and(steps, steps - 1), 0)
        every = tf.equal(steps % self.average_every, 0)
        return tf.where(steps < self.average_every, doubled, every)

    @property
    def may_be_dense(self) -> bool:
        """Whether there are steps in which `dense_exchange` runs in place of `exchange`."""
        return bool(self.warm_up_steps or self.dense_every or self.waits_for)

    @property
    def changes(self) -> tuple[int, ...]:
        """Increasing steps at which another exchange begins, by phases or stages."""
        return tuple(sorted({*(until for until, _ in self.phases), *self.stages}))

    def offset(self, fragment: int) -> int:
        """Return the step of a round of `local_steps` steps at which a fragment's turn comes."""
        return fragment * self.local_steps // max(1, self.fragments)

    @property
    def per_worker_weights(self) -> bool:
        """Whether each worker computes its gradients at its own weights."""
        return bool(self.local_steps or self.delay or self.own_point)
