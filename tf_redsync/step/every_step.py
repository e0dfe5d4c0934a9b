"""Every step exchanges gradients, densely in a warm-up and at every k-th step if methods say so.

And as long as methods wait for something, see `Cadence.waits_for`. Methods that go through phases,
`Cadence.phases`, change from one exchange to the next at a step, and those with `Cadence.stages`
from one method to the next.

Branches depend on the step and on shared state, which are equal on all workers: a branch around a
collective on anything else would deadlock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from tf_redsync.auto import cost
from tf_redsync.exchange.driver import Network, Outcome
from tf_redsync.exchange.layout import Bucket
from tf_redsync.exchange.method import State
from tf_redsync.step import flush_step
from tf_redsync.step.dense_warm_up import WarmUp
from tf_redsync.step.meter import Meter
from tf_redsync.step.nonfinite import NonFiniteCounter
from tf_redsync.step.plan import (
    Inputs,
    dense_plan,
    joined,
    split,
    whole,
)
from tf_redsync.step.state_variables import Consensus, StateVariables


class EveryStep:
    """One exchange a step.

    Args:
        buckets: The buckets, in the order in which they are exchanged.
        warm_up: A dense warm-up of all methods, if there is one.

    Attributes:
        own_weights: Whether each worker computes its gradients at weights of its own.
        own_steps: Whether each worker skips steps by itself.
        skips: Counts skipped steps; see `step/nonfinite.py`.
        averages_statistics: Whether BatchNormalization's statistics are averaged only when
            `statistics_due` says so, and not in every step.
        delay: Steps by which totals come late.
        off: Whether all is exchanged densely for now, as in a warm-up. It is read where a step is
            traced; see `step/switching.py`.
        meter: Notes how many elements are sent.
        clock: int64 variable, number of exchanges so far, where there are steps.
    """

    own_weights = False
    own_steps = False
    skips: NonFiniteCounter | None = None
    averages_statistics = False
    delay = 0
    off = False
    meter: Meter | None = None
    clock: Any = None

    def __init__(self, buckets: Sequence[Bucket], warm_up: WarmUp | None = None):
        self.buckets, self.warm_up = tuple(buckets), warm_up
        may_be_dense = warm_up or any(b.method.cadence.may_be_dense for b in self.buckets)
        self.alone = dense_plan(self.buckets)  # one worker has nothing to compress for
        self.whole = whole(self.buckets)
        self.parts = split(self.buckets) if may_be_dense else (self.whole,)

    def init(self, bucket: Bucket) -> tuple[State, dict[str, str]]:
        """Return a bucket's first state, and the kind of each of its names."""
        return bucket.method.init(bucket.layout), bucket.method.state_kinds

    def names_in_run(self, bucket: Bucket) -> Collection[str] | None:
        """Return what of a bucket's state `run` gets, and may change; `None` for all of it."""
        del bucket
        return None

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
            grads: For every bucket, its gradients, float32 or bfloat16.
            states: For every bucket, its state.
            scale: A factor for all gradients or `None`.
            step: int64 scalar, number of exchanges so far.
            network: What carries the requests.

        Returns:
            For every bucket `(totals, new_state)`; the agreed finiteness; bytes sent.
        """
        inputs = Inputs(grads, states, scale, step, network, self.meter)
        if network.workers == 1:
            return self.alone.run(inputs)
        warming, begun = self.begun(step)
        return self.exchanged(dataclasses.replace(inputs, step=begun), warming)

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
        staged = [b.method for b in self.buckets if b.method.cadence.stages]
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

    def warmed(self) -> tf.Tensor | None:
        """Return what `begun` said in the step whose exchange has just been counted."""
        if self.off:
            return tf.constant(True)
        return None if self.warm_up is None else self.warm_up.lasted()

    def flush(self, states: Sequence[State], network: Network) -> Outcome:
        """Deliver what waits in the states, in a step without gradients; see `run`."""
        return flush_step.flush(self.buckets, states, network)

    def always_stored(self, state: State) -> State:
        """Return what of a new state is stored even if the step is not finite."""
        del state
        return {}

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
        return 0.0 if workers == 1 else sum(self.bytes_of(b, workers) for b in self.buckets)

    def bytes_of(self, bucket: Bucket, workers: int) -> float:
        """Those of one bucket, on two workers or more."""
        method, layout = bucket.method, dataclasses.replace(bucket.layout, workers=workers)
        share = 1.0 / self.dense_every if method.cadence.dense_every else 0.0
        sent = (1.0 - share) * cost.bytes_sent(cost.messages(method, layout))
        if share:
            sent += share * cost.bytes_sent(cost.messages(method, layout, "dense_exchange"))
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
