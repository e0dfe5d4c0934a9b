"""Streaming: local steps, with fragments of the model exchanged in turn, perhaps late.

With H local steps and F fragments, each a bucket; W the weights that all workers agree on, w a
worker's own; t the steps since all of w was W. Fragment p's turn comes at t = p H / F (mod H), from
step 1 on. Without a delay it is exchanged then, as `LocalSteps` exchanges all of the model. With
one:

    after step t:           moving <- w - W
    in step t + 1 + j:      part j of `moving`, of `delay` parts, is exchanged      j < delay
    after step t + delay:   W <- W + outer(moving);  w <- mixing w + (1 - mixing) W

What a step sends is state from the step before, so the collective runs beside the forward and the
backward pass. A part that is not finite on any worker makes all go back to W in this fragment.

To go to the consensus is an exchange of all fragments at once; what was on its way is dropped, for
the weights still have it.
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
from tf_redsync.step.changing_steps import whole
from tf_redsync.step.every_step import Inputs
from tf_redsync.step.fit_steps import WarmUp
from tf_redsync.step.local_steps import LocalSteps, Sent, nothing_sent, outer_step
from tf_redsync.step.nonfinite import NonFiniteCounter
from tf_redsync.step.state_variables import Consensus, StateVariables

_MOVING = "moving"  # its name in a bucket's state, float32 [delay, elements]


class Fragment:
    """Tensors that are exchanged together.

    Args:
        bucket: They.

    Attributes:
        parts: The bucket of a part of their changes, one tensor in a row; without a delay the
            bucket itself.
        exchange: Exchanges a part.
    """

    def __init__(self, bucket: Bucket):
        self.bucket, self.sync_schedule = bucket, bucket.method.sync_schedule
        self.parts = bucket
        if self.sync_schedule.delay:
            spec = TensorSpec("part", (-(-self.size // self.sync_schedule.delay),))
            layout = dataclasses.replace(bucket.layout, specs=(spec,))
            self.parts = Bucket(bucket.method, layout)
        self.exchange = whole([self.parts])

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(s.size for s in self.bucket.layout.specs)

    def age(self, steps: tf.Tensor) -> tf.Tensor:
        """Return how many steps ago its turn came; the length of a round if it never has."""
        offset = self.sync_schedule.offset(self.bucket.layout.specs[0].fragment)
        age = (steps - offset) % self.sync_schedule.local_steps
        return tf.where(age < steps, age, self.sync_schedule.local_steps)

    def in_parts(self, changes: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return changes of the weights as `[delay, elements of a part]`, the last filled up."""
        (part,) = self.parts.layout.specs
        vector = tf.concat([tf.reshape(c, [-1]) for c in changes], axis=0)
        padded = tf.pad(vector, [[0, self.sync_schedule.delay * part.size - self.size]])
        return tf.reshape(padded, [self.sync_schedule.delay, part.size])

    def by_tensor(self, parts: tf.Tensor) -> list[tf.Tensor]:
        """Undo `in_parts`."""
        specs = self.bucket.layout.specs
        tensors = tf.split(tf.reshape(parts, [-1])[: self.size], [s.size for s in specs])
        return [tf.reshape(t, s.shape) for t, s in zip(tensors, specs, strict=True)]


class Streaming(LocalSteps):
    """An exchange of the changes of one fragment after another.

    Args:
        buckets: The fragments, in any order.
        steps: Number of steps between two exchanges of a fragment, H.
        warm_up: A dense warm-up, if there is one.
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
        """With a delay what is on its way is state too."""
        values, kinds = super().init(bucket)
        delay = bucket.method.sync_schedule.delay
        if not delay:
            return values, kinds
        (part,) = Fragment(bucket).parts.layout.specs
        moving = {_MOVING: [tf.zeros([delay, part.size])]}
        return {**values, **moving}, {**kinds, _MOVING: "mean"}

    @override
    def statistics_due(self, consensus: Consensus) -> tf.Tensor:
        """Once in a round."""
        return tf.equal(consensus.steps.read_value() % self.steps, 0)

    @override
    def after_update(
        self,
        consensus: Consensus,
        states: Sequence[StateVariables],
        rate: tf.Tensor,
        network: Network,
    ) -> Sent:
        """Exchange what is due."""
        before = consensus.steps.read_value()
        pairs = list(zip(self.fragments, states, strict=True))
        outcomes = [
            tf.cond(
                fragment.age(before) < fragment.sync_schedule.delay,
                functools.partial(self._send, fragment, consensus, state, network, before),
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
            turn = tf.equal(fragment.age(steps), 0)
            if not delay:
                at_once = functools.partial(self._exchange, fragment, consensus, state, network)
                outcomes.append(tf.cond(turn, at_once, nothing_sent))
                continue
            arrive = functools.partial(self._arrive, fragment, consensus, state)
            tf.cond(tf.equal(fragment.age(steps), delay), arrive, lambda: None)
            take = functools.partial(self._take, fragment, consensus, state)
            tf.cond(turn, take, lambda: None)
        sent, finite = zip(*outcomes, strict=True)
        return tf.add_n(sent), tf.reduce_all(finite)

    def _exchange(
        self, fragment: Fragment, consensus: Consensus, state: StateVariables, network: Network
    ) -> Sent:
        """Exchange a fragment, all at once."""
        changes = [c / network.workers for c in consensus.changes(fragment.bucket.layout.specs)]
        rounds = consensus.rounds.read_value()
        own = state.read(fragment.bucket.method.state_kinds)
        inputs = Inputs([changes], [own], None, rounds, network, self.meter)
        outcome = fragment.exchange.run(inputs, None)
        ((means, new),) = outcome.results
        self._renew(fragment, consensus, state, means, new, outcome.finite)
        return tf.cast(outcome.bytes_sent, tf.float64), outcome.finite

    def _take(self, fragment: Fragment, consensus: Consensus, state: StateVariables) -> None:
        """Begin to exchange a fragment: what is to be sent stays as it is now."""
        state.assign(
            {_MOVING: [fragment.in_parts(consensus.changes(fragment.bucket.layout.specs))]}
        )

    def _send(
        self,
        fragment: Fragment,
        consensus: Consensus,
        state: StateVariables,
        network: Network,
        steps: tf.Tensor,
    ) -> Sent:
        """Exchange a part of what is on its way: the mean takes its place."""
        (moving,), number = state.read()[_MOVING], fragment.age(steps)
        part, rounds = moving[number] / network.workers, consensus.rounds.read_value()
        inputs = Inputs([[part]], [{}], None, rounds, network)
        outcome = fragment.exchange.run(inputs, None)
        (((total,), _),) = outcome.results
        total = tf.where(outcome.finite, total, float("nan"))
        moved = tf.tensor_scatter_nd_update(moving, [[number]], [total])
        state.assign({_MOVING: [moved]})
        return tf.cast(outcome.bytes_sent, tf.float64), outcome.finite

    def _arrive(self, fragment: Fragment, consensus: Consensus, state: StateVariables) -> None:
        """Take over what has arrived of a fragment."""
        (moving,) = state.read()[_MOVING]
        finite = tf.reduce_all(tf.math.is_finite(moving))
        self._renew(fragment, consensus, state, fragment.by_tensor(moving), {}, finite)

    def _renew(
        self,
        fragment: Fragment,
        consensus: Consensus,
        state: StateVariables,
        means: Sequence[tf.Tensor],
        new: State,
        finite: tf.Tensor,
    ) -> None:
        """Move a fragment's weights on, or, if its changes are not finite, back."""
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

        def go_back() -> None:
            for agreed, own in pairs:
                own.assign(agreed.read_value(), read_value=False)

        tf.cond(finite, advance, go_back)
        if self.nonfinite is not None:
            everything = [changes.get(i, tf.zeros([])) for i in range(len(consensus.own))]
            self.nonfinite.count_round(finite, everything, self._iterations)
        consensus.rounds.assign_add(1)

    @override
    def bytes_of(self, bucket: Bucket, workers: int) -> float:
        """Mean over a round."""
        parts = max(1, bucket.method.sync_schedule.delay)
        return parts * super().bytes_of(Fragment(bucket).parts, workers)
