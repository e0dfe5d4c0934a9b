"""Streaming: local steps that exchange the fragments of a model in turn, optionally with a delay.

A round has H local steps, and the model has F fragments, each with a bucket for every method. W are
the weights that all workers agree on, and w a worker's own weights. t is the number of steps since
all of w was W. Fragment p is due at t = p H / F (mod H), from step 1 on. Without a delay it is
exchanged in this step, as `LocalSteps` exchanges the whole model. With a delay:

    after step t:           moving <- w - W
    from step t + 1 on:     moving <- mean over workers of moving
    after step t + delay:   W <- W + outer(moving);  w <- mixing w + (1 - mixing) W

Step t + 1 begins the exchange in the background, and step t + delay waits for it. The exchange
therefore overlaps with `delay` steps. NCCL has a single order of collectives, so with NCCL step
t + 1 runs the exchange. If a change is non-finite on any worker, all workers return to W in this
fragment.

The new state of the exchange, such as a residual, is in flight together with the changes. It
becomes the method's state after step t + delay.

`to_consensus` exchanges all fragments at once. Changes and state in flight are dropped, because the
weights still contain the changes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import tensorflow as tf
from typing_extensions import override

from tf_redsync.exchange.driver import Network, Outcome
from tf_redsync.exchange.layout import Bucket
from tf_redsync.exchange.method import State
from tf_redsync.network.collectives import DirectCollectives
from tf_redsync.ops.wire import all_finite
from tf_redsync.step.background import Background
from tf_redsync.step.branches import rarely
from tf_redsync.step.changing_steps import plan_of
from tf_redsync.step.exchange_schedule import ExchangeSchedule, Inputs
from tf_redsync.step.local_steps import LocalSteps, Sent, nothing_sent, outer_step
from tf_redsync.step.state_variables import Consensus, StateVariables

_MOVING = "moving"  # state name of the changes in flight
_MOVING_STATE = "moving_"  # prefix of the method's state names in flight


class Streaming(LocalSteps):
    """Exchanges the weight changes of one fragment after another.

    Args:
        buckets: Buckets of one fragment each, in any order.
        steps: Number of steps between two exchanges of a fragment, H.
        nonfinite: Counts skipped steps.
        warm_up: A dense warm-up, or `None`.
    """

    _background: Background | None = None  # from the first trace on

    @override
    def init(self, bucket: Bucket) -> tuple[State, dict[str, str]]:
        """Add the changes and the method's state in flight, if there is a delay."""
        values, kinds = super().init(bucket)
        if not bucket.method.sync_schedule.delay:
            return values, kinds
        moving = {_MOVING: "mean"}
        for name, kind in bucket.method.traits.state_kinds.items():
            moving[_MOVING_STATE + name] = kind
        zeros = {name: [tf.zeros(s.shape) for s in bucket.layout.specs] for name in moving}
        return {**values, **zeros}, {**kinds, **moving}

    @override
    def count_elements(self, network: Network) -> None:
        super().count_elements(network)
        if self._background is not None:
            self._background.trace_again()

    @override
    def settle(self) -> None:
        if self._background is not None:
            self._background.settle()

    @override
    def statistics_due(self, consensus: Consensus) -> tf.Tensor:
        """Return whether BatchNormalization's statistics are averaged now, once per round."""
        return tf.equal(consensus.steps.read_value() % self.steps, 0)

    @override
    def after_update(
        self,
        consensus: Consensus,
        states: Sequence[StateVariables],
        rate: tf.Tensor,
        network: Network,
    ) -> Sent:
        """Exchange the fragments that are due."""
        before = consensus.steps.read_value()
        pairs = list(zip(self.buckets, states, strict=True))
        background = self._background_thread(consensus, states, network)
        outcomes = []
        for index, (fragment, state) in enumerate(pairs):
            if fragment.method.sync_schedule.delay:
                send = functools.partial(self._transfer, fragment, consensus, state, network)
                if background is not None:
                    send = functools.partial(self._begin, background, index, consensus, network)
                outcomes.append(rarely(tf.equal(age_of(fragment, before), 0), send, nothing_sent))
        warmed = self.warmed()
        steps = before + (1 if warmed is None else tf.cast(~warmed, tf.int64))
        consensus.steps.assign(steps)
        for fragment, state in pairs:
            delay = fragment.method.sync_schedule.delay
            due = tf.equal(age_of(fragment, steps), 0)
            if not delay:
                at_once = functools.partial(self._exchange, fragment, consensus, state, network)
                outcomes.append(rarely(due, at_once, nothing_sent))
                continue
            finish = functools.partial(
                self._finish_transfer, fragment, consensus, state, background
            )
            rarely(tf.equal(age_of(fragment, steps), delay), finish, lambda: None)
            start = functools.partial(self._start_transfer, fragment, consensus, state)
            rarely(due, start, lambda: None)
        sent, finite = zip(*outcomes, strict=True)
        return tf.add_n(sent), tf.reduce_all(finite)

    def _background_thread(
        self, consensus: Consensus, states: Sequence[StateVariables], network: Network
    ) -> Background | None:
        """Return the background thread of delayed exchanges.

        `None` if no fragment is delayed, or if exchanges cannot run in the background.
        """
        delays = [f.method.sync_schedule.delay for f in self.buckets]
        if self._background is None and any(delays):
            apart = network.in_background() if isinstance(network, DirectCollectives) else None
            if apart is not None:
                transfers = [
                    lambda rounds, f=f, s=s: self._transfer(f, consensus, s, apart, rounds)[1]
                    for f, s in zip(self.buckets, states, strict=True)
                ]
                self._background = Background(tf.distribute.get_strategy(), transfers)
        return self._background

    def _begin(
        self, background: Background, index: int, consensus: Consensus, network: Network
    ) -> Sent:
        """Begin the exchange of a fragment in the background."""
        background.begin(index, consensus.rounds.read_value())
        sent = ExchangeSchedule.bytes_of(self, self.buckets[index], network.workers)
        return tf.constant(sent, tf.float64), tf.constant(True)

    def _exchange(
        self, fragment: Bucket, consensus: Consensus, state: StateVariables, network: Network
    ) -> Sent:
        """Exchange a fragment without a delay."""
        self._keep_counts(fragment)
        self._exchange_counts(fragment, network)
        changes = consensus.changes(fragment.layout.specs)
        rounds = consensus.rounds.read_value()
        means, new, outcome = self._averaged(fragment, state, changes, network, rounds)
        self._update(fragment, consensus, state, means, new, outcome.finite)
        return tf.cast(outcome.bytes_sent, tf.float64), outcome.finite

    def _averaged(
        self,
        fragment: Bucket,
        state: StateVariables,
        changes: Sequence[tf.Tensor],
        network: Network,
        rounds: tf.Tensor,
    ) -> tuple[list[tf.Tensor], State, Outcome]:
        """Exchange changes; return their means over the workers, the new state and the outcome."""
        old = state.read(fragment.method.traits.state_kinds)
        parts = [c / network.workers for c in changes]
        inputs = Inputs([parts], [old], None, rounds, network, self.meter)
        outcome = plan_of([fragment], dense=False).run(inputs)
        ((means, new),) = outcome.results
        return means, new, outcome

    def _start_transfer(
        self, fragment: Bucket, consensus: Consensus, state: StateVariables
    ) -> None:
        """Store a fragment's current changes, which the next step sends."""
        state.assign({_MOVING: consensus.changes(fragment.layout.specs)})
        self._keep_counts(fragment)

    def _keep_counts(self, fragment: Bucket) -> None:
        """Store this worker's count of skipped steps for the last fragment's exchange."""
        if fragment is self.buckets[-1]:
            self.nonfinite.store_counts(self._iterations)

    def _exchange_counts(self, fragment: Bucket, network: Network) -> None:
        """Gather the workers' counts of skipped steps with the last fragment of a round."""
        if fragment is self.buckets[-1]:
            self.nonfinite.exchange_counts(network)

    def _transfer(
        self,
        fragment: Bucket,
        consensus: Consensus,
        state: StateVariables,
        network: Network,
        rounds: tf.Tensor | None = None,
    ) -> Sent:
        """Exchange the changes in flight; replace them by their means, and store the new state."""
        rounds = consensus.rounds.read_value() if rounds is None else rounds
        self._exchange_counts(fragment, network)
        (changes,) = state.read([_MOVING]).values()
        means, new, outcome = self._averaged(fragment, state, changes, network, rounds)
        moved = {_MOVING: [tf.where(outcome.finite, m, float("nan")) for m in means]}
        for name, old in state.read(new).items():
            pairs = zip(new[name], old, strict=True)
            moved[_MOVING_STATE + name] = [tf.where(outcome.finite, n, o) for n, o in pairs]
        state.assign(moved)
        return tf.cast(outcome.bytes_sent, tf.float64), outcome.finite

    def _finish_transfer(
        self,
        fragment: Bucket,
        consensus: Consensus,
        state: StateVariables,
        background: Background | None,
    ) -> None:
        """Apply the mean changes in flight of a fragment, and adopt the state in flight."""
        names = fragment.method.traits.state_kinds
        with tf.control_dependencies([] if background is None else [background.wait()]):
            moved = state.read([_MOVING, *(_MOVING_STATE + name for name in names)])
            means = moved.pop(_MOVING)
            new = {name.removeprefix(_MOVING_STATE): tensors for name, tensors in moved.items()}
            self._update(fragment, consensus, state, means, new, all_finite(means))

    def _update(
        self,
        fragment: Bucket,
        consensus: Consensus,
        state: StateVariables,
        means: Sequence[tf.Tensor],
        new: State,
        finite: tf.Tensor,
    ) -> None:
        """Apply a fragment's mean changes, or restore the consensus if they are non-finite."""
        specs, mixing = fragment.layout.specs, fragment.method.sync_schedule.mixing
        pairs = [(consensus.agreed[s.position], consensus.own[s.position]) for s in specs]
        changes = dict(zip([s.position for s in specs], consensus.changes(specs), strict=True))

        def advance() -> None:
            weights = [tf.cast(agreed.read_value(), tf.float32) for agreed, _ in pairs]
            weights, slots = outer_step(fragment, means, weights, state.read())
            state.assign({**new, **slots})
            for (agreed, own), renewed in zip(pairs, weights, strict=True):
                local = tf.cast(own.read_value(), tf.float32) if mixing else renewed
                agreed.assign(tf.cast(renewed, agreed.dtype), read_value=False)
                own.assign(tf.cast(mixing * local + (1.0 - mixing) * renewed, own.dtype))

        def restore() -> None:
            for agreed, own in pairs:
                own.assign(agreed.read_value(), read_value=False)

        tf.cond(finite, advance, restore)
        everything = [changes.get(i, tf.zeros([])) for i in range(len(consensus.own))]
        if fragment is self.buckets[-1]:
            self.nonfinite.count_round(finite, everything, self._iterations)
        else:
            self.nonfinite.count_within_round(finite, everything)
        consensus.rounds.assign_add(1)


def age_of(fragment: Bucket, steps: tf.Tensor) -> tf.Tensor:
    """Return the steps since the fragment was due, int64; `local_steps` if it never was."""
    schedule = fragment.method.sync_schedule
    age = (steps - schedule.offset(fragment.layout.specs[0].fragment)) % schedule.local_steps
    return tf.where(age < steps, age, schedule.local_steps)
