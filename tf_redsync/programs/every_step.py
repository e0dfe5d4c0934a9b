"""Every step exchanges gradients, densely in a warm-up and at every k-th step if methods say so.

And as long as methods wait for something, see `Cadence.waits_for`. Methods that go through phases,
`Cadence.phases`, change from one exchange to the next at a step.

Branches depend on the step and on shared state, which are equal on all workers: a branch around a
collective on anything else would deadlock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_redsync.auto import cost
from tf_redsync.exchange import wire
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.driver import Network, Outcome, drive
from tf_redsync.exchange.layout import Bucket
from tf_redsync.exchange.skips import Skips
from tf_redsync.exchange.state import Consensus, StateVariables
from tf_redsync.methods.base import Exchange, Method, State
from tf_redsync.programs.branches import choose, in_turn, phase_at


class EveryStep:
    """One exchange a step.

    Args:
        buckets: The buckets, in the order in which they are exchanged.

    Attributes:
        own_weights: Whether each worker computes its gradients at weights of its own.
        own_steps: Whether each worker skips steps by itself.
        skips: Counts skipped steps; see `exchange/skips.py`.
        averages_statistics: Whether BatchNormalization's statistics are averaged only in steps
            after which the weights are the consensus.
        delay: Steps by which totals come late.
    """

    own_weights = False
    own_steps = False
    skips: Skips | None = None
    averages_statistics = False
    delay = 0

    def __init__(self, buckets: Sequence[Bucket]):
        self.buckets = tuple(buckets)

    def init(self, bucket: Bucket) -> tuple[State, dict[str, str]]:
        """Return a bucket's first state and the kinds of what is in it; see `exchange/state.py`."""
        return bucket.method.init(bucket.layout), bucket.method.state_kinds

    def run(
        self,
        grads: Sequence[list[tf.Tensor]],
        states: Sequence[dict[str, Any]],
        scale: tf.Tensor | None,
        step: tf.Tensor,
        network: Network,
    ) -> Outcome:
        """Exchange one step's gradients.

        Args:
            grads: For every bucket, its float32 gradients.
            states: For every bucket, its state.
            scale: A factor for all gradients or `None`.
            step: int64 scalar, number of exchanges so far.
            network: What carries the requests.

        Returns:
            For every bucket `(totals, new_state)`; the agreed finiteness; bytes sent.
        """
        dense = self._dense_at(step, states) if network.workers > 1 else None

        def of(program: EveryStep, grads, states) -> Outcome:
            phase = program.either(grads, states, scale, step, network)
            return choose(None if program.always_dense else dense, phase, network)

        return of(self, grads, states) if dense is None else self.apart(of, grads, states)

    @property
    def always_dense(self) -> bool:
        """Whether all methods do the same in dense and in other steps."""
        return all(type(b.method).exchange is type(b.method).dense_exchange for b in self.buckets)

    def apart(
        self,
        of: Callable[[EveryStep, list[list[tf.Tensor]], list[State]], Outcome],
        grads: Sequence[list[tf.Tensor]],
        states: Sequence[State],
    ) -> Outcome:
        """Exchange the buckets whose methods are always dense after, and apart from, the others.

        So they need not stand in the branches of a step that may be dense: these are traced, and
        optimised by TensorFlow, twice. Returns the outcome for all buckets.

        Args:
            of: Exchanges the buckets of a program: gets it, their gradients and their states.
            grads: For every bucket, its gradients.
            states: For every bucket, its state.
        """
        split: tuple[list[int], list[int]] = ([], [])
        for i, bucket in enumerate(self.buckets):
            split[EveryStep([bucket]).always_dense].append(i)
        results: list[Any] = [None] * len(self.buckets)
        finite, sent = [], 0.0
        for part in filter(None, split):
            program = EveryStep([self.buckets[i] for i in part])
            outcome = of(program, [grads[i] for i in part], [states[i] for i in part])
            for i, result in zip(part, outcome.results, strict=True):
                results[i] = result
            finite.append(outcome.finite)
            sent += tf.cast(outcome.bytes_sent, tf.float64)
        return Outcome(results, tf.reduce_all(finite), sent)

    def always_stored(self, state: State) -> State:
        """Return what of a new state is stored even if the step is not finite."""
        del state
        return {}

    def interrupt(self) -> None:
        """Note that a check of the gradients has this step skip the exchange."""

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

    def to_consensus(
        self, consensus: Consensus, states: Sequence[StateVariables], network: Network
    ) -> None:
        """Make the model's weights those that all workers agree on."""

    def either(self, grads, states, scale, step, network) -> Callable[[bool], Outcome]:
        """What runs either the dense or the compressed exchange of everything."""
        alone = network.workers == 1  # nothing to compress for
        phases = [phase for b in self.buckets for phase in b.method.cadence.phases]
        ends = [] if alone else sorted({end for end, _ in phases})

        def run(dense_phase: bool) -> Outcome:
            def dense(method: Method) -> bool:
                return alone or (dense_phase and method.cadence.may_be_dense)

            def from_step(start: int) -> Outcome:
                def exchange(method: Method, g, state, ctx: Context) -> Exchange:
                    name = "dense_exchange" if dense(method) else phase_at(method, start)
                    return getattr(method, name)(g, state, ctx)

                return self.drive(exchange, dense, grads, states, scale, step, network)

            return in_turn(step, ends, from_step, network)

        return run

    def drive(self, exchange, dense, grads, states, scale, step, network) -> Outcome:
        """Drive one exchange a bucket, and look at the totals that are not all-reduced."""
        exchanges, looked_at, rank = [], [], network.rank()
        for i, (bucket, g, s) in enumerate(zip(self.buckets, grads, states, strict=True)):
            exchanges.append(
                exchange(bucket.method, g, s, Context(bucket.layout, rank, step, scale))
            )
            if bucket.method.totals_may_overflow and not dense(bucket.method):
                looked_at.append(i)
        outcome = drive(exchanges, network)
        totals = [total for i in looked_at for total in outcome.results[i][0]]
        outcome.finite &= wire.totals_are_finite(totals)
        return outcome

    def _dense_at(self, step: tf.Tensor, states: Sequence[State]) -> tf.Tensor | None:
        """Whether methods with a dense phase are in it, all together; `None` if there is none."""
        pairs = zip(self.buckets, states, strict=True)
        when = [~b.method.ready(state) for b, state in pairs if b.method.cadence.waits_for]
        if self.warm_up_steps:
            when.append(step < self.warm_up_steps)
        if self.dense_every:
            when.append(tf.equal(step % self.dense_every, 0))
        return tf.reduce_any(when) if when else None

    def bytes_per_step(self, workers: int) -> float:
        """Bytes one worker sends in a step after warm-up, from a trace that is never executed.

        The mean of an even and an odd step, for methods that take turns, and of the dense steps
        that `dense_every` asks for.
        """
        if workers == 1:
            return 0.0
        sent = 0.0
        for bucket in self.buckets:
            method, layout = bucket.method, dataclasses.replace(bucket.layout, workers=workers)
            share = 1.0 / self.dense_every if method.cadence.dense_every else 0.0
            sent += (1.0 - share) * cost.bytes_sent(cost.messages(method, layout))
            if share:
                dense = cost.messages(method, layout, "dense_exchange")
                sent += share * cost.bytes_sent(dense)
        return sent

    @property
    def warm_up_steps(self) -> int:
        """Length of the dense warm-up.

        Raises:
            ValueError: when methods ask for dense warm-ups of different lengths.
        """
        steps = [b.method.cadence.warm_up_steps for b in self.buckets]
        return self._common("DenseWarmUp.steps", steps)

    @property
    def dense_every(self) -> int:
        """Every so many steps the exchange is dense; 0 for never.

        Raises:
            ValueError: when methods ask for different numbers.
        """
        return self._common("full_every", [b.method.cadence.dense_every for b in self.buckets])

    def _common(self, name: str, values: Sequence[int]) -> int:
        different = set(values) - {0}
        if len(different) > 1:
            raise ValueError(
                f"`{name}` must be the same in all methods. Received: {sorted(different)}"
            )
        return different.pop() if different else 0
