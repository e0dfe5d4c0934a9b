"""Streaming: local steps that exchange the fragments of a model in turn, optionally with a delay.

With H local steps and F fragments, each a bucket; W the weights that all workers agree on, w a
worker's own; t the steps since all of w was W. Fragment p is due at t = p H / F (mod H), from step
1 on. Without a delay it is exchanged then, as `LocalSteps` exchanges the whole model. With a delay:

    after step t:           moving <- w - W
    in step t + 1 + j:      chunk j of the `delay` chunks of `moving` is exchanged    j < delay
    after step t + delay:   W <- W + outer(moving);  w <- mixing w + (1 - mixing) W

A step sends state of the previous step, so the collective overlaps with the forward and the
backward pass. If a chunk is non-finite on any worker, all workers return to W in this fragment.

The method's state, such as a residual, moves in the same chunks: each chunk's exchange renews the
chunk's state in flight, and the state becomes that after step t + delay.

`to_consensus` exchanges all fragments at once. Changes and state in flight are dropped, because the
weights still contain the changes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import tensorflow as tf
from typing_extensions import override

from tf_redsync.exchange.driver import Network
from tf_redsync.exchange.layout import Bucket, TensorSpec
from tf_redsync.exchange.method import State
from tf_redsync.step.changing_steps import single_group
from tf_redsync.step.every_step import Inputs
from tf_redsync.step.fit_steps import WarmUp
from tf_redsync.step.local_steps import LocalSteps, Sent, nothing_sent, outer_step
from tf_redsync.step.nonfinite import NonFiniteCounter
from tf_redsync.step.state_variables import Consensus, StateVariables

_MOVING = "moving"  # state name of the changes in flight, float32 [delay, elements of a chunk]
_MOVING_STATE = "moving_"  # prefix of the method's state names in flight, of the same shape


class Fragment:
    """Tensors whose changes are exchanged together.

    Args:
        bucket: The tensors.

    Attributes:
        chunk: The bucket of one chunk of their changes, as a vector; without a delay `bucket`.
        exchange: Exchanges one chunk.
    """

    def __init__(self, bucket: Bucket):
        self.bucket, self.sync_schedule = bucket, bucket.method.sync_schedule
        self.chunk = bucket
        if self.sync_schedule.delay:
            spec = TensorSpec("chunk", (-(-self.size // self.sync_schedule.delay),))
            layout = dataclasses.replace(bucket.layout, specs=(spec,))
            self.chunk = Bucket(bucket.method, layout)
        self.exchange = single_group([self.chunk])

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(s.size for s in self.bucket.layout.specs)

    def age(self, steps: tf.Tensor) -> tf.Tensor:
        """Return the steps since the fragment was due; the length of a round if it never was."""
        offset = self.sync_schedule.offset(self.bucket.layout.specs[0].fragment)
        age = (steps - offset) % self.sync_schedule.local_steps
        return tf.where(age < steps, age, self.sync_schedule.local_steps)

    def to_chunks(self, changes: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return changes of the weights as `[delay, elements of a chunk]`, padded with zeros."""
        (chunk,) = self.chunk.layout.specs
        vector = tf.concat([tf.reshape(c, [-1]) for c in changes], axis=0)
        padded = tf.pad(vector, [[0, self.sync_schedule.delay * chunk.size - self.size]])
        return tf.reshape(padded, [self.sync_schedule.delay, chunk.size])

    def from_chunks(self, chunks: tf.Tensor) -> list[tf.Tensor]:
        """Return the changes by tensor; the inverse of `to_chunks`."""
        specs = self.bucket.layout.specs
        tensors = tf.split(tf.reshape(chunks, [-1])[: self.size], [s.size for s in specs])
        return [tf.reshape(t, s.shape) for t, s in zip(tensors, specs, strict=True)]


def _names_in_flight(fragment: Fragment) -> list[str]:
    """Return the state names of what moves in chunks: the changes, and the method's state."""
    kinds = fragment.bucket.method.traits.state_kinds
    return [_MOVING, *(_MOVING_STATE + name for name in kinds)]


class Streaming(LocalSteps):
    """Exchanges the changes of one fragment after another.

    Args:
        buckets: The fragments, in any order.
        steps: Number of steps between two exchanges of a fragment, H.
        warm_up: A dense warm-up, or `None`.
        nonfinite: Counts skipped steps.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        steps: int,
        warm_up: WarmUp | None = None,
        nonfinite: NonFiniteCounter | None = None,
    ):
        super().__init__(buckets, steps, warm_up, nonfinite)
        self.most_steps = None
        self.fragments = [Fragment(b) for b in self.buckets]

    @override
    def init(self, bucket: Bucket) -> tuple[State, dict[str, str]]:
        """Add the changes and the method's state in flight, if there is a delay."""
        values, kinds = super().init(bucket)
        delay = bucket.method.sync_schedule.delay
        if not delay:
            return values, kinds
        (chunk,) = Fragment(bucket).chunk.layout.specs
        moving = {_MOVING: "mean"}
        for name, kind in bucket.method.traits.state_kinds.items():
            moving[_MOVING_STATE + name] = kind
        zeros = {name: [tf.zeros([delay, chunk.size])] for name in moving}
        return {**values, **zeros}, {**kinds, **moving}

    @override
    def statistics_due(self, consensus: Consensus) -> tf.Tensor:
        """Return whether BatchNormalization's statistics are averaged: once in a round."""
        return tf.equal(consensus.steps.read_value() % self.steps, 0)

    @override
    def after_update(
        self,
        consensus: Consensus,
        states: Sequence[StateVariables],
        rate: tf.Tensor,
        network: Network,
    ) -> Sent:
        """Exchange the fragments and chunks that are due."""
        before = consensus.steps.read_value()
        pairs = list(zip(self.fragments, states, strict=True))
        outcomes = [
            tf.cond(
                fragment.age(before) < fragment.sync_schedule.delay,
                functools.partial(self._send_chunk, fragment, consensus, state, network, before),
                nothing_sent,
            )
            for fragment, state in pairs
            if fragment.sync_schedule.delay
        ]
        warmed = self.warmed()
        steps = before + (1 if warmed is None else tf.cast(~warmed, tf.int64))
        consensus.steps.assign(steps)
        for fragment, state in pairs:
            delay = fragment.sync_schedule.delay
            due = tf.equal(fragment.age(steps), 0)
            if not delay:
                at_once = functools.partial(self._exchange, fragment, consensus, state, network)
                outcomes.append(tf.cond(due, at_once, nothing_sent))
                continue
            finish = functools.partial(self._finish_transfer, fragment, consensus, state)
            tf.cond(tf.equal(fragment.age(steps), delay), finish, lambda: None)
            start = functools.partial(self._start_transfer, fragment, consensus, state)
            tf.cond(due, start, lambda: None)
        sent, finite = zip(*outcomes, strict=True)
        return tf.add_n(sent), tf.reduce_all(finite)

    def _exchange(
        self, fragment: Fragment, consensus: Consensus, state: StateVariables, network: Network
    ) -> Sent:
        """Exchange a whole fragment without a delay."""
        changes = [c / network.workers for c in consensus.changes(fragment.bucket.layout.specs)]
        rounds = consensus.rounds.read_value()
        own = state.read(fragment.bucket.method.traits.state_kinds)
        inputs = Inputs([changes], [own], None, rounds, network, self.meter)
        outcome = fragment.exchange.run(inputs, None)
        ((means, new),) = outcome.results
        self._update(fragment, consensus, state, means, new, outcome.finite)
        return tf.cast(outcome.bytes_sent, tf.float64), outcome.finite

    def _start_transfer(
        self, fragment: Fragment, consensus: Consensus, state: StateVariables
    ) -> None:
        """Store the current changes of a fragment, which the next steps send, and its state."""
        changes = consensus.changes(fragment.bucket.layout.specs)
        moving = {_MOVING: [fragment.to_chunks(changes)]}
        for name, tensors in state.read(fragment.bucket.method.traits.state_kinds).items():
            moving[_MOVING_STATE + name] = [fragment.to_chunks(tensors)]
        state.assign(moving)

    def _send_chunk(
        self,
        fragment: Fragment,
        consensus: Consensus,
        state: StateVariables,
        network: Network,
        steps: tf.Tensor,
    ) -> Sent:
        """Exchange one chunk of the changes in flight; store its mean and new state there."""
        number, rounds = fragment.age(steps), consensus.rounds.read_value()
        names = fragment.bucket.method.traits.state_kinds
        moving = state.read(_names_in_flight(fragment))
        rows = {name: group[0][number] for name, group in moving.items()}
        old = {name: [rows[_MOVING_STATE + name]] for name in names}
        chunk = rows[_MOVING] / network.workers
        outcome = fragment.exchange.run(Inputs([[chunk]], [old], None, rounds, network), None)
        (((total,), new),) = outcome.results
        renewed = {_MOVING: tf.where(outcome.finite, total, float("nan"))}
        for name in names:
            renewed[_MOVING_STATE + name] = tf.where(outcome.finite, new[name][0], old[name][0])
        for name, row in renewed.items():
            (chunks,) = moving[name]
            state.assign({name: [tf.tensor_scatter_nd_update(chunks, [[number]], [row])]})
        return tf.cast(outcome.bytes_sent, tf.float64), outcome.finite

    def _finish_transfer(
        self, fragment: Fragment, consensus: Consensus, state: StateVariables
    ) -> None:
        """Apply the received changes of a fragment, and the state that their exchange left."""
        moving = state.read(_names_in_flight(fragment))
        moved = {name: fragment.from_chunks(chunks) for name, (chunks,) in moving.items()}
        means = moved.pop(_MOVING)
        new = {name.removeprefix(_MOVING_STATE): tensors for name, tensors in moved.items()}
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(m)) for m in means])
        self._update(fragment, consensus, state, means, new, finite)

    def _update(
        self,
        fragment: Fragment,
        consensus: Consensus,
        state: StateVariables,
        means: Sequence[tf.Tensor],
        new: State,
        finite: tf.Tensor,
    ) -> None:
        """Apply a fragment's mean changes, or restore the consensus if they are non-finite."""
        specs, mixing = fragment.bucket.layout.specs, fragment.sync_schedule.mixing
        pairs = [(consensus.agreed[s.position], consensus.own[s.position]) for s in specs]
        changes = dict(
            zip(
                [s.position for s in specs],
                consensus.changes(fragment.bucket.layout.specs),
                strict=True,
            )
        )

        def advance() -> None:
            totals, slots = outer_step(fragment.bucket, list(means), state.read())
            state.assign({**new, **slots})
            for (agreed, own), total in zip(pairs, totals, strict=True):
                renewed = tf.cast(agreed.read_value(), tf.float32) + total
                kept = tf.cast(own.read_value(), tf.float32) if mixing else renewed
                agreed.assign(tf.cast(renewed, agreed.dtype), read_value=False)
                own.assign(tf.cast(mixing * kept + (1.0 - mixing) * renewed, own.dtype))

        def restore() -> None:
            for agreed, own in pairs:
                own.assign(agreed.read_value(), read_value=False)

        tf.cond(finite, advance, restore)
        if self.nonfinite is not None:
            everything = [changes.get(i, tf.zeros([])) for i in range(len(consensus.own))]
            self.nonfinite.count_round(finite, everything, self._iterations)
        consensus.rounds.assign_add(1)

    @override
    def bytes_of(self, bucket: Bucket, workers: int) -> float:
        """Return the mean bytes per step over a round."""
        chunks = max(1, bucket.method.sync_schedule.delay)
        return chunks * super().bytes_of(Fragment(bucket).chunk, workers)
