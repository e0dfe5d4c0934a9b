"""Steps that change: dense ones at first or at times, phases, and stages of a method.

Branches depend on the step and on shared state, which are equal on all workers: a branch around a
collective on anything else would deadlock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf
from typing_extensions import override

from tf_redsync.exchange.driver import Network, Outcome
from tf_redsync.exchange.layout import Bucket
from tf_redsync.exchange.method import State
from tf_redsync.step.branches import choose
from tf_redsync.step.every_step import (
    EveryStep,
    Inputs,
    Plan,
    always_dense,
    dense_plan,
    plan_at,
)
from tf_redsync.step.fit_steps import WarmUp


@dataclasses.dataclass(frozen=True)
class Phases:
    """One plan before a step, and another one from it on."""

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
    """Return what buckets run.

    Args:
        buckets: The buckets.
        dense: Whether methods that have dense steps are in one.
    """
    ends = sorted({step for b in buckets for step in b.method.sync_schedule.changes})
    *earlier, found = (plan_at(buckets, dense, start) for start in (0, *ends))
    plan: Plan | Phases = found
    for until, before in zip(reversed(ends), reversed(earlier), strict=True):
        plan = Phases(until, before, plan)
    return plan


@dataclasses.dataclass(frozen=True)
class Part:
    """Buckets that are exchanged together, in dense steps and in the others.

    Attributes:
        positions: Which of the program's buckets.
        dense: What they run in dense steps; `None` if that is the same.
        compressed: What they run in other steps.
        warm: What they run in a dense warm-up of all methods; `None` if that is the same.
    """

    positions: tuple[int, ...]
    dense: Plan | Phases | None
    compressed: Plan | Phases
    warm: Plan | None

    def run(
        self, inputs: Inputs, is_dense: tf.Tensor | None, warming: tf.Tensor | None = None
    ) -> Outcome:
        """Exchange one step's gradients.

        Args:
            inputs: Of this part's buckets.
            is_dense: Bool scalar, equal on all workers: whether methods that have dense steps are
                in one; `None` for never.
            warming: The same for a warm-up of all methods.
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


def whole(buckets: Sequence[Bucket]) -> Part:
    """Return all buckets as one part."""
    return _part(buckets, range(len(buckets)))


def split(buckets: Sequence[Bucket]) -> tuple[Part, ...]:
    """Return the buckets in two parts, the ones whose methods are always dense after the others.

    So they need not stand in the branches of a step that may be dense: these are traced, and
    optimised by TensorFlow, twice.
    """
    always = [always_dense(b.method) for b in buckets]
    positions = ([i for i, a in enumerate(always) if a == last] for last in (False, True))
    return tuple(_part(buckets, p) for p in positions if p)


def joined(parts: Sequence[Part], outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome of all buckets, from those of their parts."""
    found = {
        position: result
        for part, outcome in zip(parts, outcomes, strict=True)
        for position, result in zip(part.positions, outcome.results, strict=True)
    }
    finite = tf.reduce_all([o.finite for o in outcomes])
    sent = tf.add_n([tf.cast(o.bytes_sent, tf.float64) for o in outcomes])
    return Outcome([found[i] for i in sorted(found)], finite, sent)


def _part(buckets: Sequence[Bucket], positions: Sequence[int]) -> Part:
    own = [buckets[i] for i in positions]
    same = all(always_dense(b.method) for b in own)
    dense, warm = (None, None) if same else (plan_of(own, dense=True), dense_plan(own))
    return Part(tuple(positions), dense, plan_of(own, dense=False), warm)


class ChangingSteps(EveryStep):
    """An exchange in every step, not always the same.

    It is dense in a warm-up, at every k-th step if methods say so, and as long as methods wait for
    something (`SyncSchedule.waits_for`). Methods with `phases` change from one exchange to the next
    at a step, and those with `stages` from one method to the next.

    Args:
        buckets: The buckets, in the order in which they are exchanged.
        warm_up: A dense warm-up of all methods, if there is one.
    """

    def __init__(self, buckets: Sequence[Bucket], warm_up: WarmUp | None = None):
        super().__init__(buckets)
        self.warm_up = warm_up
        may_be_dense = warm_up or any(b.method.sync_schedule.may_be_dense for b in self.buckets)
        self.whole = whole(self.buckets)
        self.parts = split(self.buckets) if may_be_dense else (self.whole,)

    @override
    def run(self, inputs: Inputs) -> Outcome:
        """Exchange one step's gradients; see `EveryStep.run`."""
        if inputs.network.workers == 1:
            return self.alone.run(inputs)
        warming, begun = self.begun(inputs.step)
        return self.exchanged(dataclasses.replace(inputs, step=begun), warming)

    @override
    def count_elements(self, network: Network) -> None:
        """Where collectives cannot stand in branches all plans run, so that nothing is counted."""
        if network.in_branches or not (
            self.warm_up or any(b.method.sync_schedule.may_be_dense for b in self.buckets)
        ):
            super().count_elements(network)

    def exchanged(self, inputs: Inputs, warming: tf.Tensor | None = None) -> Outcome:
        """Exchange by the methods, unless in a warm-up of all of them.

        Args:
            inputs: With the methods' own step.
            warming: See `Part.run`.
        """
        self._check_stages(inputs.network)
        is_dense = self._dense_at(inputs.step, inputs.states)
        outcomes = [part.run(inputs.of(part.positions), is_dense, warming) for part in self.parts]
        return joined(self.parts, outcomes)

    def _check_stages(self, network: Network) -> None:
        """Check that not all stages would have to run in each step, for one of them to be kept."""
        staged = [b.method for b in self.buckets if b.method.sync_schedule.stages]
        if staged and not network.in_branches:
            raise ValueError(
                f"{type(staged[0]).__name__} needs collectives that can stand in branches: worker "
                "processes, with direct_collectives=True. Received: direct_collectives=False, or "
                "replicas of one process. There use RedSync or DGC with "
                "warm_up=ExponentialWarmUp(...), or a constant density."
            )

    def begun(self, step: tf.Tensor) -> tuple[tf.Tensor | None, tf.Tensor]:
        """Return whether a step is in the warm-up of all methods, and the methods' own step.

        `None` without such a warm-up. The one place where it is decided.
        """
        own = step if self.warm_up is None else self.warm_up.after(step)
        if self.off:
            return tf.constant(True), own
        return (None if self.warm_up is None else self.warm_up.lasts(step)), own

    @override
    def warmed(self) -> tf.Tensor | None:
        """Return what `begun` said in the step whose exchange has just been counted."""
        if self.off:
            return tf.constant(True)
        return None if self.warm_up is None else self.warm_up.lasted()

    def _dense_at(self, step: tf.Tensor, states: Sequence[State]) -> tf.Tensor | None:
        """Whether methods with a dense phase are in it, all together; `None` if there is none."""
        pairs = zip(self.buckets, states, strict=True)
        when = [~b.method.ready(state) for b, state in pairs if b.method.sync_schedule.waits_for]
        if self.warm_up_steps:
            when.append(step < self.warm_up_steps)
        if self.dense_every:
            when.append(tf.equal(step % self.dense_every, 0))
        return tf.reduce_any(when) if when else None

    @property
    def warm_up_steps(self) -> int:
        """Length of the dense warm-up.

        Raises:
            ValueError: when methods ask for dense warm-ups of different lengths.
        """
        steps = [b.method.sync_schedule.warm_up_steps for b in self.buckets]
        return self._common("DenseWarmUp.steps", steps)

    @property
    def dense_every(self) -> int:
        """Every so many steps the exchange is dense; 0 for never.

        Raises:
            ValueError: when methods ask for different numbers.
        """
        return self._common(
            "full_every", [b.method.sync_schedule.dense_every for b in self.buckets]
        )

    def _common(self, name: str, values: Sequence[int]) -> int:
        different = set(values) - {0}
        if len(different) > 1:
            raise ValueError(
                f"`{name}` must be the same in all methods. Received: {sorted(different)}"
            )
        return different.pop() if different else 0
