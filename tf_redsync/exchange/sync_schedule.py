"""When a method exchanges what; `step/` has a schedule for each kind."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import tensorflow as tf

from tf_redsync.outer import Outer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Intervals:
    """Distances between exchanges that grow; see `tf_redsync/step/zero_one.py`.

    Args:
        dense_double_after: Dense steps follow each other at first, and their distance doubles after
            each so many of them.
        local_start: Number of first steps that all workers take together. There are no dense ones
            after them, but local ones.
        local_double_after: Local steps in a round are one at first, and their number doubles after
            each so many steps.

    The last two are fractions of the training where they are below 1; see `of`.
    """

    dense_double_after: int
    local_start: Any
    local_double_after: Any

    @property
    def of_training(self) -> bool:
        """Whether anything is a fraction of the training."""
        return min(self.local_start, self.local_double_after) < 1

    def of(self, total: Any) -> Intervals:
        """Return the same in steps.

        Args:
            total: The number of steps of the training: an int, or an int64 scalar of a graph.
        """
        return dataclasses.replace(
            self,
            local_start=_steps(self.local_start, total),
            local_double_after=_steps(self.local_double_after, total),
        )

    def dense(self, step: tf.Tensor) -> tf.Tensor:
        """Return whether a step is dense: bool scalar, for int64 `step`."""
        starts = [self.dense_double_after * (2**distance - 1) for distance in range(32)]
        starts = tf.constant(starts, tf.int64)  # of distances of 1, 2, 4 and so on
        block = tf.reduce_sum(tf.cast(step >= starts, tf.int64)) - 1
        since = step - tf.gather(starts, block)
        return tf.equal(since % tf.bitwise.left_shift(tf.constant(1, tf.int64), block), 0)

    def local(self, step: tf.Tensor) -> tf.Tensor:
        """Return whether workers take a step alone: bool scalar, for int64 `step`."""
        return step >= self.local_start

    def length(self, step: tf.Tensor, most: int) -> tf.Tensor:
        """Return the number of local steps in a round, int64, at most `most`."""
        doubled = tf.clip_by_value((step - self.local_start) // self.local_double_after, 0, 32)
        return tf.minimum(tf.bitwise.left_shift(tf.constant(1, tf.int64), doubled), most)


def _steps(asked: Any, total: Any) -> Any:
    """Return a number of steps: a fraction of the training's is rounded, at least 1."""
    if asked >= 1:
        return asked
    if isinstance(total, int):
        return max(1, math.floor(asked * total + 0.5))
    return tf.maximum(tf.cast(tf.floor(asked * tf.cast(total, tf.float64) + 0.5), tf.int64), 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyncSchedule:
    """When a method exchanges what. It decides which schedule of `tf_redsync/step/` runs.

    The default: the gradients of every step, by `Method.exchange`.

    Args:
        warm_up_steps: Number of first steps in which `dense_exchange` runs in place of `exchange`.
        dense_every: Every so many steps `dense_exchange` runs in place of `exchange`; 0 for never.
        waits_for: What `exchange` waits for, in words. Until `Waiting.ready` says that it has come,
            `dense_exchange` runs. Empty: nothing.
        phases: `(until, name)`, rising: before step `until`, the method's generator `name` runs in
            place of `exchange`.
        stages: Steps, rising, at each of which `Staged.at` begins to return another method.
        local_steps: Steps that a worker takes alone between two exchanges of the weights' changes;
            0 for gradients.
        delay: Steps by which a total comes late: 0 or 1, with fragments any number.
        own_point: Whether each worker computes its gradients at a point of its own, from
            `EvaluationPoint.point`.
        outer: What is done with the mean of the local changes, a `tf_redsync.outer.Outer`; `None`:
            they are added to the weights.
        fragments: How many parts of the model are exchanged in turn, each every `local_steps`
            steps; 0 for no turns.
        mixing: Of a worker's own weights, the share that is kept when their fragment is renewed.
        intervals: Of exchanges that become rarer, up to `local_steps`; `None`: they do not.
        masks_local_momentum: Whether the optimizer's momentum is cleared where a local change was
            sent.
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

    @property
    def may_be_dense(self) -> bool:
        """Whether there are steps in which `dense_exchange` runs in place of `exchange`."""
        return bool(self.warm_up_steps or self.dense_every or self.waits_for)

    @property
    def changes(self) -> tuple[int, ...]:
        """Steps, rising, at which another exchange begins, by phases or stages."""
        return tuple(sorted({*(until for until, _ in self.phases), *self.stages}))

    def offset(self, fragment: int) -> int:
        """Return the step of a round of `local_steps` steps at which a fragment's turn comes."""
        return fragment * self.local_steps // max(1, self.fragments)

    @property
    def per_worker_weights(self) -> bool:
        """Whether each worker computes its gradients at weights of its own."""
        return bool(self.local_steps or self.delay or self.own_point)
