"""What runs in a step, as data: for every bucket one of its method's exchanges.

A `Plan` is chosen from the methods alone, when a program is made; a step only drives it. Where
methods go through `Phases`, of other exchanges or of other methods (`Method.at`), the step's number
says which plan it is, and where there are dense steps and others, an agreed flag does (`Part`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from tf_redsync.exchange import wire
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.driver import Network, Outcome, drive
from tf_redsync.exchange.layout import Bucket
from tf_redsync.exchange.method import Exchange, Method, State
from tf_redsync.ops.words import widened
from tf_redsync.step.branches import choose
from tf_redsync.step.meter import Meter

Grads = list[tf.Tensor]
Run = Callable[[Grads, State, Context], Exchange]  # a method's `exchange`, or what stands for it


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a step starts from.

    Attributes:
        grads: For every bucket, its gradients, float32 or bfloat16.
        states: For every bucket, its state.
        scale: A factor for all gradients or `None`.
        step: int64 scalar, number of exchanges so far.
        network: What carries the requests.
        meter: Notes how many elements are sent, if anything does.
    """

    grads: Sequence[Grads]
    states: Sequence[State]
    scale: tf.Tensor | None
    step: tf.Tensor
    network: Network
    meter: Meter | None = None

    def of(self, positions: Sequence[int]) -> Inputs:
        """Return the inputs of some of the buckets."""
        return dataclasses.replace(
            self,
            grads=[self.grads[i] for i in positions],
            states=[self.states[i] for i in positions],
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """One exchange for each bucket.

    Attributes:
        buckets: The buckets, in the order in which they are exchanged.
        runs: Their exchanges.
        looked_at: Whether their totals may overflow, and are looked at.
        full: Whether they send all elements.
    """

    buckets: tuple[Bucket, ...]
    runs: tuple[Run, ...]
    looked_at: tuple[bool, ...]
    full: tuple[bool, ...]

    def run(self, inputs: Inputs) -> Outcome:
        """Exchange one step's gradients."""
        rank = inputs.network.rank()
        buckets = zip(self.buckets, self.runs, inputs.grads, inputs.states, strict=True)
        exchanges = [
            run(widened(grads), state, Context(bucket.layout, rank, inputs.step, inputs.scale))
            for bucket, run, grads, state in buckets
        ]
        outcome = drive(exchanges, inputs.network)
        if inputs.meter is not None:
            inputs.meter.note(self.buckets, outcome.elements, self.full)
        totals = [
            total
            for (totals, _), looked_at in zip(outcome.results, self.looked_at, strict=True)
            if looked_at
            for total in totals
        ]
        outcome.finite &= wire.totals_are_finite(totals)
        return outcome


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


def dense_plan(buckets: Sequence[Bucket]) -> Plan:
    """Return the plan in which every bucket is exchanged densely."""
    runs = tuple(b.method.dense_exchange for b in buckets)
    return Plan(tuple(buckets), runs, (False,) * len(buckets), (True,) * len(buckets))


def plan_of(buckets: Sequence[Bucket], dense: bool) -> Plan | Phases:
    """Return what buckets run.

    Args:
        buckets: The buckets.
        dense: Whether methods that have dense steps are in one.
    """
    ends = sorted({step for b in buckets for step in b.method.cadence.changes})
    *earlier, found = (_plan(buckets, dense, start) for start in (0, *ends))
    plan: Plan | Phases = found
    for until, before in zip(reversed(ends), reversed(earlier), strict=True):
        plan = Phases(until, before, plan)
    return plan


def phase_at(method: Method, step: int) -> str:
    """Return the name of the exchange that a method runs at a step that is not dense."""
    return next((name for until, name in method.cadence.phases if step < until), "exchange")


def _plan(buckets: Sequence[Bucket], dense: bool, start: int) -> Plan:
    runs, looked_at, full = [], [], []
    for bucket in buckets:
        method, is_dense = bucket.method.at(start), dense and bucket.method.cadence.may_be_dense
        name = "dense_exchange" if is_dense else phase_at(method, start)
        runs.append(getattr(method, name))
        looked_at.append(method.totals_may_overflow and not is_dense)
        full.append(name == "dense_exchange")
    return Plan(tuple(buckets), tuple(runs), tuple(looked_at), tuple(full))


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
    always = [_always_dense(b.method) for b in buckets]
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
    same = all(_always_dense(b.method) for b in own)
    dense, warm = (None, None) if same else (plan_of(own, dense=True), dense_plan(own))
    return Part(tuple(positions), dense, plan_of(own, dense=False), warm)


def _always_dense(method: Method) -> bool:
    """Whether a method does the same in dense and in other steps."""
    return type(method).exchange is type(method).dense_exchange
