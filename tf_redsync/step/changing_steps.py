"""The sync schedule of exchanges that change over time: dense steps, phases and stages.

Branches depend on the step and on shared state, which are equal on all workers. A branch around a
collective on any other value would deadlock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf
from typing_extensions import override

from tf_redsync.exchange.capabilities import Waiting, always_dense, required
from tf_redsync.exchange.driver import Network, Outcome
from tf_redsync.exchange.layout import Bucket
from tf_redsync.exchange.method import State
from tf_redsync.step.branches import choose
from tf_redsync.step.exchange_schedule import (
    ExchangeSchedule,
    Inputs,
    Plan,
    dense_plan,
    plan_at,
)
from tf_redsync.step.fit_steps import WarmUp


@dataclasses.dataclass(frozen=True)
class Phases:
    """A plan that switches from one plan to another at step `until`.

    Attributes:
        until: The first step that runs `after`.
        before: The plan of earlier steps.
        after: The plan from step `until` on, which may have further phases.
    """

    until: int
    before: Plan
    after: Plan | Phases

    def run(self, inputs: Inputs) -> Outcome:
        """Exchange one step's gradients."""
        return choose(
            inputs.step < self.until,
            lambda: self.before.run(inputs),
            lambda: self.after.run(inputs),
            inputs.network,
        )


def plan_of(buckets: Sequence[Bucket], dense: bool) -> Plan | Phases:
    """Return the plan of buckets for all steps.

    Args:
        buckets: The buckets.
        dense: Whether methods that declare dense steps (`SyncSchedule.may_be_dense`) run
            `dense_exchange`.
    """
    ends = sorted({step for b in buckets for step in b.method.sync_schedule.changes})
    *earlier, last = (plan_at(buckets, dense, start) for start in (0, *ends))
    plan: Plan | Phases = last
    for until, before in zip(reversed(ends), reversed(earlier), strict=True):
        plan = Phases(until, before, plan)
    return plan


@dataclasses.dataclass(frozen=True)
class BucketGroup:
    """Buckets that are exchanged together, with their plans for dense and compressed steps.

    Attributes:
        bucket_indices: The indices of the buckets in the schedule.
        dense: The plan of a dense step; `None` if it equals `compressed`.
        compressed: The plan of any other step.
        warm: The plan of a dense warm-up of all methods; `None` if it equals `compressed`.
    """

    bucket_indices: tuple[int, ...]
    dense: Plan | Phases | None
    compressed: Plan | Phases
    warm: Plan | None

    def run(
        self, inputs: Inputs, is_dense: tf.Tensor | None, warming: tf.Tensor | None = None
    ) -> Outcome:
        """Exchange one step's gradients.

        Args:
            inputs: The inputs of this group's buckets.
            is_dense: Bool scalar, equal on all workers: whether methods with dense steps run one
                now; `None` for never.
            warming: Bool scalar, equal on all workers: whether the step belongs to a warm-up of all
                methods; `None` for never.
        """
        dense, warm = self.dense, self.warm
        if warm is not None and warming is not None:
            return choose(
                warming,
                lambda: warm.run(inputs),
                lambda: self.run(inputs, is_dense),
                inputs.network,
            )
        if dense is None or is_dense is None:
            return self.compressed.run(inputs)
        return choose(
            is_dense,
            lambda: dense.run(inputs),
            lambda: self.compressed.run(inputs),
            inputs.network,
        )


def split_by_density(buckets: Sequence[Bucket]) -> tuple[BucketGroup, ...]:
    """Return the buckets in up to two groups; buckets of always dense methods are the last group.

    The last group then stays out of the branches of a step that may be dense. TensorFlow traces and
    optimizes operations in such branches twice.
    """
    always = [always_dense(b.method) for b in buckets]
    by_group = ([i for i, a in enumerate(always) if a == last] for last in (False, True))
    return tuple(_group(buckets, group) for group in by_group if group)


def merge_outcomes(groups: Sequence[BucketGroup], outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome of all buckets, in order, from the outcomes of their groups."""
    results = {
        index: result
        for group, outcome in zip(groups, outcomes, strict=True)
        for index, result in zip(group.bucket_indices, outcome.results, strict=True)
    }
    finite = tf.reduce_all([o.finite for o in outcomes])
    sent = tf.add_n([tf.cast(o.bytes_sent, tf.float64) for o in outcomes])
    return Outcome([results[i] for i in sorted(results)], finite, sent)


def _group(buckets: Sequence[Bucket], bucket_indices: Sequence[int]) -> BucketGroup:
    members = [buckets[i] for i in bucket_indices]
    same = all(always_dense(b.method) for b in members)
    dense, warm = (None, None) if same else (plan_of(members, dense=True), dense_plan(members))
    return BucketGroup(tuple(bucket_indices), dense, plan_of(members, dense=False), warm)


class ChangingSteps(ExchangeSchedule):
    """Exchanges gradients in every step, with an exchange that changes over time.

    Steps are dense in a warm-up, at every k-th step if methods declare that, and while methods wait
    (`SyncSchedule.waits_for`). A method with `phases` changes its exchange at given steps; a method
    with `stages` is replaced by another method.

    Args:
        buckets: The buckets, in the order in which they are exchanged.
        warm_up: A dense warm-up of all methods, or `None`.
    """

    def __init__(self, buckets: Sequence[Bucket], warm_up: WarmUp | None = None):
        super().__init__(buckets)
        self.warm_up = warm_up
        may_be_dense = warm_up or any(b.method.sync_schedule.may_be_dense for b in self.buckets)
        self.whole = _group(self.buckets, range(len(self.buckets)))
        self.groups = split_by_density(self.buckets) if may_be_dense else (self.whole,)

    @override
    def run(self, inputs: Inputs) -> Outcome:
        """Exchange one step's gradients; see `ExchangeSchedule.run`."""
        warming, begun = self.begun(inputs.step)
        return self.exchanged(dataclasses.replace(inputs, step=begun), warming)

    @override
    def count_elements(self, network: Network) -> None:
        """Count elements, unless all plans run because collectives cannot run in branches."""
        if network.in_branches or not (
            self.warm_up or any(b.method.sync_schedule.may_be_dense for b in self.buckets)
        ):
            super().count_elements(network)

    def exchanged(self, inputs: Inputs, warming: tf.Tensor | None = None) -> Outcome:
        """Run the methods' exchange, or the dense exchange of a warm-up of all methods.

        Args:
            inputs: The inputs, with the methods' own step.
            warming: See `BucketGroup.run`.
        """
        self._check_stages(inputs.network)
        is_dense = self._dense_at(inputs.step, inputs.states)
        outcomes = [g.run(inputs.of(g.bucket_indices), is_dense, warming) for g in self.groups]
        return merge_outcomes(self.groups, outcomes)

    def _check_stages(self, network: Network) -> None:
        """Check that collectives can run in branches, so that a step runs only one stage.

        Raises:
            ValueError: If a method has stages and collectives cannot run in branches.
        """
        staged = [b.method for b in self.buckets if b.method.sync_schedule.stages]
        if staged and not network.in_branches:
            raise ValueError(
                f"{type(staged[0]).__name__} needs collectives that can run in branches: worker "
                "processes, with direct_collectives=True. Received: direct_collectives=False, or "
                "replicas of one process. Use RedSync or DGC with "
                "warm_up=ExponentialWarmUp(...), or a constant density."
            )

    def begun(self, step: tf.Tensor) -> tuple[tf.Tensor | None, tf.Tensor]:
        """Return whether a step is in the warm-up of all methods, and the methods' own step.

        The first is a bool scalar, or `None` without such a warm-up; the second an int64 scalar. No
        other code makes this decision.
        """
        method_step = step if self.warm_up is None else self.warm_up.after(step)
        if self.off:
            return tf.constant(True), method_step
        return (None if self.warm_up is None else self.warm_up.lasts(step)), method_step

    @override
    def warmed(self) -> tf.Tensor | None:
        """Return whether the last counted step was in the warm-up of all methods; see `begun`."""
        if self.off:
            return tf.constant(True)
        return None if self.warm_up is None else self.warm_up.lasted()

    def _dense_at(self, step: tf.Tensor, states: Sequence[State]) -> tf.Tensor | None:
        """Return whether the step is dense, a bool scalar; `None` if no method has dense steps."""
        pairs = zip(self.buckets, states, strict=True)
        when = [
            ~required(b.method, Waiting).ready(state)
            for b, state in pairs
            if b.method.sync_schedule.waits_for
        ]
        if self.warm_up_steps:
            when.append(step < self.warm_up_steps)
        if self.dense_every:
            when.append(tf.equal(step % self.dense_every, 0))
        return tf.reduce_any(when) if when else None

    @property
    def warm_up_steps(self) -> int:
        """Length of the methods' dense warm-up in steps; 0 for none."""
        return max((b.method.sync_schedule.warm_up_steps for b in self.buckets), default=0)

    @property
    def dense_every(self) -> int:
        """The interval of dense steps, in steps; 0 for never."""
        return max((b.method.sync_schedule.dense_every for b in self.buckets), default=0)
