"""The schedule of most methods: the same exchange of gradients in every step.

A `Plan` holds the exchange of each bucket. The schedule chooses it at creation from the methods; a
step only drives it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import tensorflow as tf

from tf_redsync.exchange import traffic
from tf_redsync.exchange.capabilities import always_dense, at_step
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.driver import Network, Outcome, checked, drive
from tf_redsync.exchange.layout import Bucket
from tf_redsync.exchange.method import Exchange, Method, State, initial_state
from tf_redsync.exchange.requests import AllReduce
from tf_redsync.ops import wire
from tf_redsync.ops.wire import widened
from tf_redsync.step.meter import Meter
from tf_redsync.step.state_variables import Consensus, StateVariables

UNDELIVERED = ("residual", "pending")  # state names of gradients that are not delivered yet
Grads = list[tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The inputs of one step.

    Attributes:
        grads: For every bucket, its gradients, float32 or bfloat16.
        states: For every bucket, its state.
        scale: A factor for all gradients, float32 scalar, or `None`.
        step: int64 scalar, number of exchanges so far.
        network: The network that answers the requests.
        meter: Records how many elements are sent, or `None`.
    """

    grads: Sequence[Grads]
    states: Sequence[State]
    scale: tf.Tensor | None
    step: tf.Tensor
    network: Network
    meter: Meter | None = None

    def of(self, bucket_indices: Sequence[int]) -> Inputs:
        """Return the inputs of some of the buckets."""
        return dataclasses.replace(
            self,
            grads=[self.grads[i] for i in bucket_indices],
            states=[self.states[i] for i in bucket_indices],
        )


@dataclasses.dataclass(frozen=True)
class BucketExchange:
    """The exchange of one bucket.

    Attributes:
        bucket: The bucket.
        start: Starts the exchange: `Method.exchange`, or a substitute.
        may_overflow: Whether its totals may overflow and are checked.
        sends_all: Whether it sends all elements.
    """

    bucket: Bucket
    start: Callable[[Grads, State, Context], Exchange]
    may_overflow: bool = False
    sends_all: bool = True


@dataclasses.dataclass(frozen=True)
class Plan:
    """One exchange for each bucket.

    Attributes:
        exchanges: The exchanges, in the order in which they are started.
        float16_totals: `(bucket, tensor)` indices of the float16 variables. Their totals are cast
            to float16, which may overflow, so all workers check the cast totals.
    """

    exchanges: tuple[BucketExchange, ...]
    float16_totals: tuple[tuple[int, int], ...] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        float16_totals = [  # without an exchange the workers' totals differ
            (number, i)
            for number, exchange in enumerate(self.exchanges)
            for i, spec in enumerate(exchange.bucket.layout.specs)
            if spec.dtype == "float16" and exchange.bucket.method.traits.exchanges
        ]
        object.__setattr__(self, "float16_totals", tuple(float16_totals))

    def run(self, inputs: Inputs) -> Outcome:
        """Exchange one step's gradients; see `ExchangeSchedule.run`.

        Methods receive float32. An op that reads bfloat16 removes this cast again
        (`wire.before_cast`).
        """
        rank = inputs.network.rank()
        started = []
        for e, grads, old in zip(self.exchanges, inputs.grads, inputs.states, strict=True):
            ctx = Context(e.bucket.layout, rank, inputs.step, inputs.scale)
            started.append(checked(e.bucket.method, e.start, widened(grads), old, ctx))
        outcome = drive(started, inputs.network)
        if inputs.meter is not None:
            inputs.meter.note(self.exchanges, outcome.elements)
        overflowing = itertools.compress(outcome.results, [e.may_overflow for e in self.exchanges])
        totals = [total for totals, _ in overflowing for total in totals]
        if self.float16_totals:
            totals += self.in_float16([totals for totals, _ in outcome.results])
        if totals:
            outcome.finite &= wire.totals_are_finite(totals)
        return outcome

    def in_float16(self, totals: Sequence[Sequence[Any]]) -> list[tf.Tensor]:
        """Return `float16_totals` as they are applied."""
        return [tf.cast(totals[number][i], tf.float16) for number, i in self.float16_totals]


def dense_plan(buckets: Sequence[Bucket]) -> Plan:
    """Return the plan that exchanges every bucket densely."""
    return Plan(tuple(BucketExchange(b, b.method.dense_exchange) for b in buckets))


def phase_at(method: Method, step: int) -> str:
    """Return the name of the method's generator that runs at a compressed step."""
    return next((name for until, name in method.sync_schedule.phases if step < until), "exchange")


def plan_at(buckets: Sequence[Bucket], dense: bool, start: int) -> Plan:
    """Return the plan of buckets from step `start` until the next change.

    Args:
        buckets: The buckets.
        dense: Whether methods that declare dense steps (`SyncSchedule.may_be_dense`) run
            `dense_exchange`.
        start: The first step of the plan.
    """
    exchanges = []
    for bucket in buckets:
        method = at_step(bucket.method, start)
        is_dense = dense and bucket.method.sync_schedule.may_be_dense
        name = "dense_exchange" if is_dense else phase_at(method, start)
        may_overflow = method.traits.totals_may_overflow and not is_dense
        full = name == "dense_exchange"
        exchanges.append(BucketExchange(bucket, getattr(method, name), may_overflow, full))
    return Plan(tuple(exchanges))


def _sum_residuals(zeros: Grads, state: State, ctx: Context) -> Exchange:
    """Return the sum over workers of the residuals; `zeros` if the state has no residuals."""
    names = [name for name in UNDELIVERED if state.get(name)]
    if not names:
        return zeros, state
    contributions = [tf.add_n(list(parts)) for parts in zip(*map(state.get, names), strict=True)]
    totals = yield AllReduce(contributions)
    return totals, {**state, **{name: list(zeros) for name in names}}


def _counts(values: Sequence[tf.Tensor]) -> bool:
    """Return whether values of a state count the exchanges of the bucket."""
    return len(values) == 1 and values[0].shape.rank == 0 and values[0].dtype.is_integer


class ExchangeSchedule:
    """Base class of what runs a `SyncSchedule`; runs the same exchange in every step.

    Args:
        buckets: The buckets, in the order in which they are exchanged.

    Attributes:
        per_worker_weights: Whether each worker computes its gradients at its own weights.
        skips_locally: Whether each worker skips non-finite steps by itself.
        averages_statistics: Whether BatchNormalization's statistics are averaged only in steps that
            `statistics_due` selects, instead of every step.
        delay: Number of steps by which totals of gradients are stale.
        always_stored: State names that are stored even if the step is non-finite.
        branches: Whether collectives can run in branches; see `step/averaging.py`.
        off: Whether compression is disabled. Tracing reads this flag; see
            `GradientExchange.switch`.
        meter: Records how many elements are sent; `None` before `count_elements`.
    """

    per_worker_weights = False
    skips_locally = False
    averages_statistics = False
    delay = 0
    always_stored: tuple[str, ...] = ()
    branches = True
    off = False
    meter: Meter | None = None

    def __init__(self, buckets: Sequence[Bucket]):
        self.buckets = tuple(buckets)
        self.dense_plan = dense_plan(self.buckets)
        self.compressed_plan = plan_at(self.buckets, dense=False, start=0)

    def init(self, bucket: Bucket) -> tuple[State, dict[str, str]]:
        """Return a bucket's initial state, and the kind of each name in it."""
        return initial_state(bucket.method, bucket.layout), bucket.method.traits.state_kinds

    def read(self, states: Sequence[StateVariables]) -> list[State]:
        """Return the states that `run` reads and may change, by bucket."""
        return [s.read() for s in states]

    def run(self, inputs: Inputs) -> Outcome:
        """Exchange one step's gradients.

        Returns:
            An outcome whose `results` are `(totals, new_state)` for every bucket. Totals are sums
            over workers, float32 tensors or sparse.
        """
        dense = inputs.network.workers == 1 or (self.off and not self.always_dense)
        return (self.dense_plan if dense else self.compressed_plan).run(inputs)

    @property
    def always_dense(self) -> bool:
        """Whether all methods run the same exchange in dense and in compressed steps."""
        return all(always_dense(b.method) for b in self.buckets)

    def count_elements(self, network: Network) -> None:
        """Count the sent elements, from the next trace on; see `Meter`."""
        del network
        self.meter = Meter(self.buckets)

    def warmed(self) -> tf.Tensor | None:
        """Return whether the last counted step was in a dense warm-up of all methods.

        The result is a bool scalar, or `None` if the schedule has no warm-up.
        """
        return tf.constant(True) if self.off else None

    def flush(self, states: Sequence[State], network: Network) -> Outcome:
        """Exchange the residuals of the states, in a step without gradients; see `run`."""
        plan = Plan(tuple(BucketExchange(b, _sum_residuals) for b in self.buckets))
        zeros = [[tf.zeros(s.shape, tf.float32) for s in b.layout.specs] for b in self.buckets]
        return plan.run(Inputs(zeros, states, None, tf.constant(0, tf.int64), network))

    def hide_absent(self, states: Sequence[State], present: Set[int]) -> list[State]:
        """Return the states with residuals of 0 for variables whose totals are not applied.

        In a selection from a whole bucket they would displace elements of the other variables.

        Args:
            states: For every bucket, its state before the step.
            present: The positions of all variables that the step updates.
        """
        hidden = []
        for bucket, state in zip(self.buckets, states, strict=True):
            present_here = [s.position in present for s in bucket.layout.specs]
            residuals = state.get("residual", ())
            if len(residuals) == len(present_here):  # one for each variable
                pairs = zip(residuals, present_here, strict=True)
                state = {**state, "residual": [r if p else tf.zeros_like(r) for r, p in pairs]}
            hidden.append(state)
        return hidden

    def keep_absent(self, outcome: Outcome, states: Sequence[State], present: Set[int]) -> None:
        """Keep the state of variables whose totals are not applied.

        Args:
            outcome: The outcome of a step, whose new states this changes.
            states: For every bucket, its state before the step.
            present: The positions of all variables that the step updates.
        """
        for bucket, old, (_, new) in zip(self.buckets, states, outcome.results, strict=True):
            absent = [s.position not in present for s in bucket.layout.specs]
            for name in set(old) - set(self.always_stored):
                values = old[name]
                if len(values) == len(absent) and not _counts(values):  # one for each variable
                    new[name] = [
                        o if keep else n
                        for o, n, keep in zip(values, new[name], absent, strict=True)
                    ]

    def interrupt(self) -> None:
        """Handle other work between two exchanges: a skipped step, evaluation, or checkpoint.

        All workers call it, in a step or between two steps.
        """

    def settle(self) -> None:
        """Wait between two steps for an exchange in the background, if any."""

    def resumed(self) -> None:
        """Handle a state that was restored from another process."""

    def before_update(self, consensus: Consensus) -> None:
        """Prepare the weights for the optimizer's update, after `run`, if `per_worker_weights`."""

    def note_rate(self, states: Sequence[StateVariables], rate: Callable[[], Any] | None) -> None:
        """Use the learning rate of the optimizer's update, before it, if `per_worker_weights`.

        Args:
            states: For every bucket, the variables of its state, after the state was stored.
            rate: Returns the rate, a scalar.
        """

    def after_update(
        self,
        consensus: Consensus,
        states: Sequence[StateVariables],
        rate: tf.Tensor,
        network: Network,
    ) -> tuple[tf.Tensor, tf.Tensor] | None:
        """Set each worker's weights after the optimizer's update.

        Args:
            consensus: The weights.
            states: For every bucket, the variables of its state, after the state was stored.
            rate: The learning rate of the optimizer's next update.
            network: The network that answers requests.

        Returns:
            The bytes sent, float64, and whether all values were finite, bool; `None` if the
            schedule never sends anything here.
        """
        return None

    def statistics_due(self, consensus: Consensus) -> tf.Tensor:
        """Return whether BatchNormalization's statistics are averaged after this step."""
        del consensus
        return tf.constant(True)

    def to_consensus(
        self, consensus: Consensus, states: Sequence[StateVariables], network: Network
    ) -> tf.Tensor | None:
        """Set the model's weights to those that all workers agree on.

        Returns:
            The bytes sent; `None` if that never sends anything.
        """
        del consensus, states, network
        return None

    def attach_optimizer(
        self, momenta: Mapping[int, tf.Variable], iterations: tf.Variable | None
    ) -> None:
        """Use the optimizer's variables; see `GradientExchange.attach_optimizer`."""

    def bytes_per_step(self, workers: int) -> float:
        """Return the mean bytes that one worker sends per step after warm-up.

        The mean is over a period of the method (`Traits.period`) and over the dense steps of
        `dense_every`. While compression is disabled, steps are dense. Bytes are computed by the
        method's formula or from a trace that is never executed; see `traffic.messages`.
        """
        return sum(self.bytes_in_use(b, workers) for b in self.buckets)

    def bytes_in_use(self, bucket: Bucket, workers: int) -> float:
        """Return the part of one bucket in `bytes_per_step`."""
        if workers == 1:
            return 0.0
        if not self.off or (self.always_dense and not self.skips_locally):
            return self.bytes_of(bucket, workers)
        layout = dataclasses.replace(bucket.layout, workers=workers)
        return traffic.bytes_sent(traffic.messages(bucket.method, layout, "dense_exchange"))

    def bytes_of(self, bucket: Bucket, workers: int) -> float:
        """Return the bytes per step of one bucket, compressed, for two workers or more."""
        method, layout = bucket.method, dataclasses.replace(bucket.layout, workers=workers)
        schedule = method.sync_schedule
        share = 1.0 / schedule.dense_every if schedule.dense_every else 0.0
        sent = (1.0 - share) * traffic.bytes_sent(traffic.messages(method, layout))
        if share:
            sent += share * traffic.bytes_sent(traffic.messages(method, layout, "dense_exchange"))
        every = schedule.average_every if self.branches else 1
        return sent + traffic.bytes_sent([traffic.averages(method, layout)]) / max(1, every)
