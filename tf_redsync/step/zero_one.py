"""The schedule of 0/1 Adam: synchronous steps that exchange momenta, followed by local steps.

With t the step, from 0; s from `Intervals`; H the largest number of local steps:

    t < s:   dense steps, at intervals of 1, 2, 4, ...   `dense_exchange` of gradients
             all other steps                             `momentum_exchange`
    t >= s:  `LocalSteps`, in rounds of 1, 2, 4, ... steps, at most H

Its methods implement `LocalMomentum` of `exchange/capabilities.py`. The end of a round scales the
changes by the state `rates`. A non-finite round resets the momentum to 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from typing_extensions import override

from tf_redsync.exchange.capabilities import LocalMomentum, required
from tf_redsync.exchange.driver import Network, Outcome
from tf_redsync.exchange.layout import Bucket
from tf_redsync.exchange.sync_schedule import Intervals
from tf_redsync.step.branches import choose
from tf_redsync.step.exchange_schedule import BucketExchange, Inputs, Plan
from tf_redsync.step.fit_steps import TrainingLength, WarmUp
from tf_redsync.step.local_steps import LocalSteps, Sent, nothing_sent
from tf_redsync.step.nonfinite import NonFiniteCounter
from tf_redsync.step.state_variables import Consensus, StateVariables


class ZeroOne(LocalSteps):
    """Exchanges momenta in synchronous steps, then weight changes at growing intervals.

    Args:
        buckets: The buckets, in the order in which they are exchanged.
        steps: The largest number of steps between two exchanges, H.
        nonfinite: Counts skipped steps.
        warm_up: A dense warm-up, or `None`.
        training: The length of the training, if the intervals are fractions of it.
        clock: int64 variable, number of steps so far.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        steps: int,
        nonfinite: NonFiniteCounter,
        warm_up: WarmUp | None = None,
        training: TrainingLength | None = None,
        clock: Any = None,
    ):
        super().__init__(buckets, steps, nonfinite, warm_up)
        self._clock = clock
        self._training, self._asked = training, buckets[0].method.sync_schedule.intervals
        self._methods = [required(b.method, LocalMomentum) for b in self.buckets]
        pairs = zip(self.buckets, self._methods, strict=True)
        self.momentum_plan = Plan(tuple(BucketExchange(b, m.momentum_exchange) for b, m in pairs))

    @property
    def intervals(self) -> Intervals:
        """The intervals, in steps."""
        return self._asked if self._training is None else self._asked.of(self._training.read())

    @override
    def run(self, inputs: Inputs) -> Outcome:
        """Exchange gradients or momenta in a synchronous step; else return local momenta."""
        warming, begun = self.begun(inputs.step)
        inputs, network = dataclasses.replace(inputs, step=begun), inputs.network
        dense = self.intervals.dense(begun)
        if warming is not None:
            dense |= warming
        together = self._is_synchronous(warming, begun)
        by_position = self._by_position(inputs.grads)
        outcome = choose(
            together,
            lambda: choose(
                dense,
                lambda: self.dense_plan.run(inputs),
                lambda: self.momentum_plan.run(inputs),
                network,
            ),
            lambda: self._local_step(inputs),
            network,
        )
        tf.cond(
            together,
            lambda: self._count_together(outcome, by_position),
            lambda: self._count(outcome, by_position),
        )
        return outcome

    def _is_synchronous(self, warming: tf.Tensor | None, begun: tf.Tensor) -> tf.Tensor:
        together = ~self.intervals.local(begun)
        return together if warming is None else together | warming

    @override
    def warmed(self) -> tf.Tensor:
        """Return whether the last counted step was synchronous, a bool scalar."""
        return self._is_synchronous(*self.begun(self._clock.read_value() - 1))

    @override
    def note_rate(self, states: Sequence[StateVariables], rate: Callable[[], Any] | None) -> None:
        """Add the rate of a local step."""
        assert rate is not None
        now, steps = tf.cast(rate(), tf.float32), tf.cast(self._clock.read_value(), tf.float32)
        for method, state in zip(self._methods, states, strict=True):
            (rates,) = state.read(["rates"])["rates"]
            added = tf.where(self.warmed(), 0.0, method.rate_of_step(now, steps))
            state.assign({"rates": [rates + added]})

    @override
    def after_update(
        self,
        consensus: Consensus,
        states: Sequence[StateVariables],
        rate: tf.Tensor,
        network: Network,
    ) -> Sent:
        """Count a local step, and exchange the changes at the end of the round."""
        warming, begun = self.begun(self._clock.read_value() - 1)
        is_local = ~self._is_synchronous(warming, begun)
        consensus.steps.assign_add(tf.cast(is_local, tf.int64), read_value=False)
        due = is_local & (consensus.steps.read_value() >= self.intervals.length(begun, self.steps))
        return tf.cond(due, lambda: self.exchange_changes(consensus, states, network), nothing_sent)

    @override
    def exchange_changes(
        self, consensus: Consensus, states: Sequence[StateVariables], network: Network
    ) -> Sent:
        """Exchange the weight changes; if they are non-finite, set momentum and `rates` to 0."""
        sent, finite = super().exchange_changes(consensus, states, network)

        def reset() -> None:
            for state in states:
                held = state.read()
                names = ("momentum", "rates")
                state.assign({n: [tf.zeros_like(x) for x in held[n]] for n in names})

        tf.cond(finite, lambda: None, reset)
        return sent, finite
