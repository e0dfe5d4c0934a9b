"""Local steps: each worker trains alone for k steps, then the workers exchange weight changes.

With k local steps, W the weights that all workers agree on and w a worker's own, in each round:

    w <- W;  k times: w <- optimizer(w, gradient at w)      no communication
    W <- W + outer(mean over workers of exchanged(w - W))

The changes are divided by the number of workers and pass through the method's exchange like
gradients, so that their sum is a mean. The residual keeps the elements that the method does not
send. `outer` is the method's outer optimizer, whose slots are state of the bucket; without one the
mean is added. Each worker has its own inner optimizer, whose momentum follows the worker's
gradients. If W has 16 bits, its rounding error is state of the bucket, too: the next round adds it.

Each worker skips its own non-finite steps and reports them at the end of the round. The optimizer's
update counter, which learning rates depend on, is then set to the maximum over the workers. If the
changes of a round are non-finite on any worker, all workers return to W.

A dense warm-up of all methods has no rounds. Gradients are all-reduced in every step, so that the
workers take the same steps with equal optimizers. The rounds begin after the warm-up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import tensorflow as tf
from typing_extensions import override

from tf_redsync.exchange.capabilities import LocalMomentum, capability
from tf_redsync.exchange.driver import Network, Outcome
from tf_redsync.exchange.layout import Bucket
from tf_redsync.exchange.method import State
from tf_redsync.ops.wire import all_finite, widened
from tf_redsync.step.branches import carry, choose, rarely
from tf_redsync.step.changing_steps import ChangingSteps
from tf_redsync.step.exchange_schedule import Inputs
from tf_redsync.step.fit_steps import WarmUp
from tf_redsync.step.nonfinite import NonFiniteCounter, not_finite
from tf_redsync.step.state_variables import Consensus, StateVariables

Sent = tuple[tf.Tensor, tf.Tensor]  # bytes sent, and bool: all finite
_OUTER = "outer_"  # prefix of the outer optimizer's slots in the state of a bucket
_ROUNDING = _OUTER + "rounding"  # state name of the weights' rounding errors


class LocalSteps(ChangingSteps):
    """Exchanges weight changes every k steps.

    Args:
        buckets: The buckets, in the order in which they are exchanged.
        steps: Number of steps between two exchanges, k.
        nonfinite: Counts skipped steps.
        warm_up: A dense warm-up, or `None`.
    """

    per_worker_weights = True
    skips_locally = True
    averages_statistics = True

    def __init__(
        self,
        buckets: Sequence[Bucket],
        steps: int,
        nonfinite: NonFiniteCounter,
        warm_up: WarmUp | None = None,
    ):
        super().__init__(buckets, warm_up)
        self.steps, self.nonfinite = steps, nonfinite
        self._momenta: Mapping[int, tf.Variable] = {}  # the optimizer's, by position
        self._iterations: tf.Variable | None = None  # the optimizer's

    @override
    def attach_optimizer(
        self, momenta: Mapping[int, tf.Variable], iterations: tf.Variable | None
    ) -> None:
        self._momenta, self._iterations = momenta, iterations

    @override
    def init(self, bucket: Bucket) -> tuple[State, dict[str, str]]:
        """Add the outer optimizer's slots, and the rounding errors of a model with 16-bit weights.

        All buckets have the errors then, so that snapshots do not depend on the grouping.
        """
        values, kinds = super().init(bucket)
        outer = bucket.method.sync_schedule.outer
        names = [] if outer is None else [_OUTER + name for name in outer.slots]
        if any(s.dtype != "float32" for b in self.buckets for s in b.layout.specs):
            names.append(_ROUNDING)
        slots = {n: [tf.zeros(s.shape) for s in bucket.layout.specs] for n in names}
        if outer is not None:
            slots[_OUTER + "steps"] = [tf.zeros([], tf.int64)]
        return {**values, **slots}, {**kinds, **dict.fromkeys(slots, "shared")}

    @override
    def read(self, states: Sequence[StateVariables]) -> list[State]:
        """Return the methods' states. The outer optimizers' change only at the end of a round."""
        names = (b.method.traits.state_kinds for b in self.buckets)
        return [s.read(n) for s, n in zip(states, names, strict=True)]

    @override
    def run(self, inputs: Inputs) -> Outcome:
        """Return gradients times the number of workers, by which Keras has divided the loss."""
        warming, _ = self.begun(inputs.step)
        by_position = self._by_position(inputs.grads)
        if warming is None:
            outcome = self._local_step(inputs)
            self._count(outcome, by_position)
            return outcome
        outcome = choose(
            warming,
            lambda: self.dense_plan.run(inputs),
            lambda: self._local_step(inputs),
            inputs.network,
        )
        tf.cond(
            warming,
            lambda: self._count_together(outcome, by_position),
            lambda: self._count(outcome, by_position),
        )
        return outcome

    def _local_step(self, inputs: Inputs) -> Outcome:
        """Run a local step, without communication."""
        workers = inputs.network.workers
        totals = [[workers * g for g in widened(bucket)] for bucket in inputs.grads]
        everything = [total for bucket in totals for total in bucket]
        finite = all_finite([*everything, *self.compressed_plan.in_float16(totals)])
        results = []
        for bucket, sums, state in zip(self.buckets, totals, inputs.states, strict=True):
            update = capability(bucket.method, LocalMomentum)
            results.append((sums, state) if update is None else update.local_step(sums, state))
        return Outcome(results, finite, 0.0)

    def _count(self, outcome: Outcome, grads: Sequence[tf.Tensor]) -> None:
        self.nonfinite.count_local_step(outcome.finite, lambda: not_finite(grads))

    def _count_together(self, outcome: Outcome, grads: Sequence[tf.Tensor]) -> None:
        self.nonfinite.count_together(outcome.finite, self.nonfinite.nonfinite_flags(grads))

    def _by_position(self, by_bucket: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
        """Return the tensors of all buckets in the order of the variables."""
        by_position = {
            spec.position: tensor
            for bucket, tensors in zip(self.buckets, by_bucket, strict=True)
            for spec, tensor in zip(bucket.layout.specs, tensors, strict=True)
        }
        return [by_position[position] for position in sorted(by_position)]

    @override
    def before_update(self, consensus: Consensus) -> None:
        """Store the weights at the start of a round."""
        consensus.capture()

    @override
    def after_update(
        self,
        consensus: Consensus,
        states: Sequence[StateVariables],
        rate: tf.Tensor,
        network: Network,
    ) -> Sent:
        """Exchange the weight changes if the round ends with this step."""
        warmed = self.warmed()
        is_local = tf.constant(1, tf.int64) if warmed is None else tf.cast(~warmed, tf.int64)
        consensus.steps.assign_add(is_local, read_value=False)
        return rarely(
            consensus.steps.read_value() >= self.steps,
            lambda: self.exchange_changes(consensus, states, network),
            nothing_sent,
        )

    @override
    def statistics_due(self, consensus: Consensus) -> tf.Tensor:
        """Return whether BatchNormalization's statistics are averaged after this step."""
        return tf.equal(consensus.steps.read_value(), 0)

    @override
    def to_consensus(
        self, consensus: Consensus, states: Sequence[StateVariables], network: Network
    ) -> tf.Tensor:
        """End the current round, if any."""
        sent, _ = tf.cond(
            consensus.steps.read_value() > 0,
            lambda: self.exchange_changes(consensus, states, network),
            nothing_sent,
        )
        return sent

    def exchange_changes(
        self, consensus: Consensus, states: Sequence[StateVariables], network: Network
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Exchange the weight changes and start a new round.

        Returns:
            The bytes sent, a float64 scalar, and a bool scalar: whether all changes were finite.
        """
        agreed = [tf.cast(v.read_value(), tf.float32) for v in consensus.agreed]
        changes = [
            [change / network.workers for change in consensus.changes(bucket.layout.specs)]
            for bucket in self.buckets
        ]
        old = self.read(states)
        rounds = consensus.rounds.read_value()
        outcome = self.exchanged(Inputs(changes, old, None, rounds, network, self.meter))
        carried, is_dense = carry((agreed, outcome.results)), self._dense_at(rounds, old)

        def advance() -> None:
            starts, results = carried()
            for bucket, variables, change, (means, new) in zip(
                self.buckets, states, changes, results, strict=True
            ):
                before = variables.read()
                if bucket.method.sync_schedule.masks_local_momentum:
                    self._mask(bucket, change, before, new, is_dense)
                old_weights = [starts[spec.position] for spec in bucket.layout.specs]
                weights, slots = outer_step(bucket, means, old_weights, before)
                variables.assign({**new, **slots})
                for spec, weight in zip(bucket.layout.specs, weights, strict=True):
                    consensus.own[spec.position].assign(tf.cast(weight, spec.dtype))

        tf.cond(outcome.finite, advance, consensus.restore)
        self.nonfinite.store_counts(self._iterations)
        self.nonfinite.exchange_counts(network)
        self.nonfinite.count_round(outcome.finite, self._by_position(changes), self._iterations)
        consensus.steps.assign(0)
        consensus.rounds.assign_add(1)
        return tf.cast(outcome.bytes_sent, tf.float64), outcome.finite

    def flush_changes(
        self,
        consensus: Consensus,
        states: Sequence[StateVariables],
        network: Network,
        served: Set[int],
    ) -> None:
        """Add the residuals to the consensus, between two rounds.

        Residuals are changes of weights here, so the optimizer is not involved.

        Args:
            consensus: The weights.
            states: For every bucket, the variables of its state.
            network: The network that answers requests.
            served: The positions of the variables whose residuals are added.
        """
        old = self.read(states)
        outcome = self.flush(old, network)
        self.keep_absent(outcome, old, served)

        def add() -> None:
            for bucket, variables, (totals, new) in zip(
                self.buckets, states, outcome.results, strict=True
            ):
                variables.assign(new)
                for spec, total in zip(bucket.layout.specs, totals, strict=True):
                    if spec.position in served:
                        weight = consensus.own[spec.position]
                        weight.assign_add(tf.cast(total, weight.dtype), read_value=False)

        tf.cond(outcome.finite, add, lambda: None)

    def _mask(
        self,
        bucket: Bucket,
        changes: Sequence[tf.Tensor],
        before: State,
        after: State,
        is_dense: tf.Tensor | None,
    ) -> None:
        """Clear the optimizer's momentum where this worker selected its change."""
        kept = [
            tf.equal(change + old, new)
            for change, old, new in zip(changes, before["residual"], after["residual"], strict=True)
        ]
        if is_dense is not None:
            kept = [keep | is_dense for keep in kept]
        for spec, keep in zip(bucket.layout.specs, kept, strict=True):
            momentum = self._momenta.get(spec.position)
            if momentum is not None:
                value = momentum.read_value()
                momentum.assign(tf.where(keep, value, tf.zeros_like(value)))

    @override
    def bytes_of(self, bucket: Bucket, workers: int) -> float:
        """Return the mean bytes per step over a round."""
        return super().bytes_of(bucket, workers) / self.steps


def outer_step(
    bucket: Bucket, means: Sequence[tf.Tensor], weights: Sequence[tf.Tensor], state: State
) -> tuple[list[tf.Tensor], State]:
    """Return the new weights, and the new state of the outer optimizer and of rounding errors.

    Args:
        bucket: The bucket.
        means: The mean changes over the workers.
        weights: The agreed weights, float32, also if their variables have 16 bits.
        state: The bucket's state.
    """
    outer, slots, totals = bucket.method.sync_schedule.outer, {}, list(means)
    if outer is not None:
        (steps,) = state[_OUTER + "steps"]
        old = {n: state[_OUTER + n] for n in outer.slots}
        totals, new = outer.step([tf.convert_to_tensor(m) for m in means], old, steps)
        slots = {_OUTER + n: v for n, v in {**new, "steps": [steps + 1]}.items()}
    moved = [weight + total for weight, total in zip(weights, totals, strict=True)]
    if _ROUNDING in state:
        moved = [weight + error for weight, error in zip(moved, state[_ROUNDING], strict=True)]
        slots[_ROUNDING] = [
            weight - tf.cast(tf.cast(weight, spec.dtype), tf.float32)
            for weight, spec in zip(moved, bucket.layout.specs, strict=True)
        ]
    return moved, slots


def nothing_sent() -> tuple[tf.Tensor, tf.Tensor]:
    """Return the outcome of a step without communication: no bytes, all finite."""
    return tf.constant(0.0, tf.float64), tf.constant(True)
