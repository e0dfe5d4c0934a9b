"""Every step exchanges gradients, in the same way: the sync schedule of most methods.

A `Plan` says what each bucket runs. It is chosen from the methods when the schedule is made; a step
only drives it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

import tensorflow as tf

from tf_redsync.auto import cost
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.driver import Network, Outcome, drive
from tf_redsync.exchange.layout import Bucket
from tf_redsync.exchange.method import Exchange, Method, State
from tf_redsync.exchange.requests import AllReduce
from tf_redsync.ops import wire
from tf_redsync.ops.wire import widened
from tf_redsync.step.meter import Meter
from tf_redsync.step.state_variables import Consensus, StateVariables

WAITING = ("residual", "pending")  # names in a state: of methods, and with a delay
Grads = list[tf.Tensor]
Run = Callable[[Grads, State, Context], Exchange]  # a method's `exchange`, or its substitute


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


def dense_plan(buckets: Sequence[Bucket]) -> Plan:
    """Return the plan in which every bucket is exchanged densely."""
    runs = tuple(b.method.dense_exchange for b in buckets)
    return Plan(tuple(buckets), runs, (False,) * len(buckets), (True,) * len(buckets))


def phase_at(method: Method, step: int) -> str:
    """Return the name of the exchange that a method runs at a step that is not dense."""
    return next((name for until, name in method.sync_schedule.phases if step < until), "exchange")


def plan_at(buckets: Sequence[Bucket], dense: bool, start: int) -> Plan:
    """Return what buckets run from step `start` on, until the next change.

    Args:
        buckets: The buckets.
        dense: Whether methods that have dense steps are in one.
        start: The step.
    """
    runs, looked_at, full = [], [], []
    for bucket in buckets:
        method, is_dense = (
            bucket.method.at(start),
            dense and bucket.method.sync_schedule.may_be_dense,
        )
        name = "dense_exchange" if is_dense else phase_at(method, start)
        runs.append(getattr(method, name))
        looked_at.append(method.totals_may_overflow and not is_dense)
        full.append(name == "dense_exchange")
    return Plan(tuple(buckets), tuple(runs), tuple(looked_at), tuple(full))


def always_dense(method: Method) -> bool:
    """Whether a method does the same in dense and in other steps."""
    return type(method).exchange is type(method).dense_exchange


def _delivered(nothing: Grads, state: State, ctx: Context) -> Exchange:
    """The sum over workers of what waits; zeros, and no request, where nothing can."""
    names = [name for name in WAITING if state.get(name)]
    if not names:
        return nothing, state
    contributions = [tf.add_n(list(parts)) for parts in zip(*map(state.get, names), strict=True)]
    totals = yield AllReduce(contributions)
    return totals, {**state, **{name: list(nothing) for name in names}}


class EveryStep:
    """One exchange a step.

    Args:
        buckets: The buckets, in the order in which they are exchanged.

    Attributes:
        own_weights: Whether each worker computes its gradients at weights of its own.
        own_steps: Whether each worker skips steps by itself.
        averages_statistics: Whether BatchNormalization's statistics are averaged only when
            `statistics_due` says so, and not in every step.
        delay: Steps by which totals come late.
        always_stored: Names in a state that are stored even if the step is not finite.
        off: Whether all is exchanged densely for now. It is read where a step is traced; see
            `GradientExchange.switch`.
        meter: Notes how many elements are sent, after `count_elements`.
    """

    own_weights = False
    own_steps = False
    averages_statistics = False
    delay = 0
    always_stored: tuple[str, ...] = ()
    off = False
    meter: Meter | None = None

    def __init__(self, buckets: Sequence[Bucket]):
        self.buckets = tuple(buckets)
        self.alone = dense_plan(self.buckets)  # one worker has nothing to compress for
        self.plan = plan_at(self.buckets, dense=False, start=0)

    def init(self, bucket: Bucket) -> tuple[State, dict[str, str]]:
        """Return a bucket's first state, and the kind of each of its names."""
        return bucket.method.init(bucket.layout), bucket.method.state_kinds

    def names_in_run(self, bucket: Bucket) -> Collection[str] | None:
        """Return what of a bucket's state `run` gets, and may change; `None` for all of it."""
        del bucket
        return None

    def run(self, inputs: Inputs) -> Outcome:
        """Exchange one step's gradients.

        Returns:
            For every bucket `(totals, new_state)`; the agreed finiteness; bytes sent.
        """
        dense = inputs.network.workers == 1 or (self.off and not self.always_dense)
        return (self.alone if dense else self.plan).run(inputs)

    @property
    def always_dense(self) -> bool:
        """Whether all methods do the same in dense and in other steps."""
        return all(always_dense(b.method) for b in self.buckets)

    def count_elements(self, network: Network) -> None:
        """Count the elements that are sent, from the next trace on."""
        del network
        self.meter = Meter(self.buckets)

    def warmed(self) -> tf.Tensor | None:
        """Return whether the step whose exchange has just been counted was dense for all methods.

        `None`: it never is.
        """
        return tf.constant(True) if self.off else None

    def flush(self, states: Sequence[State], network: Network) -> Outcome:
        """Deliver what waits in the states, in a step without gradients; see `run`."""
        number = len(self.buckets)
        plan = Plan(self.buckets, (_delivered,) * number, (False,) * number, (True,) * number)
        nothing = [[tf.zeros(s.shape, tf.float32) for s in b.layout.specs] for b in self.buckets]
        return plan.run(Inputs(nothing, states, None, tf.constant(0, tf.int64), network))

    def interrupt(self) -> None:
        """Note that a check of the gradients has this step skip the exchange."""

    def resumed(self) -> None:
        """Note that the state is now that of another process, which has been restored."""

    def before_update(self, consensus: Consensus) -> None:
        """Prepare the weights for the optimizer's update, after `run`, where they are `own`."""

    def after_update(
        self,
        consensus: Consensus,
        states: Sequence[StateVariables],
        rate: tf.Tensor,
        network: Network,
    ) -> tuple[tf.Tensor, tf.Tensor] | None:
        """Move the weights on after the optimizer's update.

        Args:
            consensus: The weights.
            states: For every bucket, its state's variables, after `run`'s state was stored.
            rate: The optimizer's learning rate.
            network: What carries requests.

        Returns:
            The bytes sent, float64, and whether all was finite, bool; `None` if nothing is ever
            sent here.
        """
        return None

    def statistics_due(self, consensus: Consensus) -> tf.Tensor:
        """Return whether BatchNormalization's statistics are averaged after this step."""
        del consensus
        return tf.constant(True)

    def to_consensus(
        self, consensus: Consensus, states: Sequence[StateVariables], network: Network
    ) -> None:
        """Make the model's weights those that all workers agree on."""

    def attach_optimizer(
        self, momenta: Mapping[int, tf.Variable], iterations: tf.Variable | None
    ) -> None:
        """Take part in what the optimizer keeps; see `GradientExchange.attach_optimizer`."""

    def bytes_per_step(self, workers: int) -> float:
        """Bytes one worker sends in a step after warm-up, from a trace that is never executed.

        The mean of an even and an odd step, for methods that take turns, and of the dense steps
        that `dense_every` asks for.
        """
        return 0.0 if workers == 1 else sum(self.bytes_of(b, workers) for b in self.buckets)

    def bytes_of(self, bucket: Bucket, workers: int) -> float:
        """Those of one bucket, on two workers or more."""
        method, layout = bucket.method, dataclasses.replace(bucket.layout, workers=workers)
        every = method.sync_schedule.dense_every
        share = 1.0 / every if every else 0.0
        sent = (1.0 - share) * cost.bytes_sent(cost.messages(method, layout))
        if share:
            sent += share * cost.bytes_sent(cost.messages(method, layout, "dense_exchange"))
        return sent
