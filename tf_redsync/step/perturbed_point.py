"""Perturbed points: each worker evaluates its gradients at its own point.

With W the weights that all workers agree on, in every step, on every worker:

    g = gradient at the worker's own point
    total = exchanged g, or with a delay of one step the exchanged g of the previous step
    W <- optimizer(W, total)                                equal on all workers
    own point <- EvaluationPoint.point(W, g, ...)

With the delay, the message is available when the step begins, so communication overlaps with the
computation of gradients. The total of the first step is then 0, and the gradient of the last step
is not applied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf
from typing_extensions import override

from tf_redsync.exchange.capabilities import EvaluationPoint, capability
from tf_redsync.exchange.driver import Network, Outcome
from tf_redsync.exchange.layout import Bucket
from tf_redsync.exchange.method import State
from tf_redsync.ops.wire import widened
from tf_redsync.step.branches import choose
from tf_redsync.step.changing_steps import ChangingSteps
from tf_redsync.step.exchange_schedule import Inputs
from tf_redsync.step.fit_steps import WarmUp
from tf_redsync.step.state_variables import Consensus, StateVariables


class PerturbedPoint(ChangingSteps):
    """Exchanges gradients at perturbed points in every step, optionally one step late.

    Args:
        buckets: The buckets, in the order in which they are exchanged.
        delay: 0, or 1: every step exchanges the gradients of the previous step.
        warm_up: A dense warm-up of all methods, or `None`.
    """

    per_worker_weights = True
    always_stored = ("pending",)

    def __init__(self, buckets: Sequence[Bucket], delay: int, warm_up: WarmUp | None = None):
        super().__init__(buckets, warm_up)
        self.delay = delay
        self._grads: list[list[tf.Tensor]] = []  # of the step that is being traced
        self._warming: tf.Tensor | None = None

    @override
    def init(self, bucket: Bucket) -> tuple[State, dict[str, str]]:
        """Add the gradients of the previous step to the state, if there is a delay."""
        values, kinds = super().init(bucket)
        if not self.delay:
            return values, kinds
        pending = [tf.zeros(s.shape, tf.float32) for s in bucket.layout.specs]
        return {**values, "pending": pending}, {**kinds, "pending": "sum"}

    @override
    def run(self, inputs: Inputs) -> Outcome:
        """Exchange one step's gradients; a step of a warm-up has no delay and no perturbation."""
        grads = self._grads = [widened(bucket) for bucket in inputs.grads]
        states, network = inputs.states, inputs.network
        warming, begun = self.begun(inputs.step)
        method_warming = begun < self.warm_up_steps if self.warm_up_steps else None
        flags = [flag for flag in (warming, method_warming) if flag is not None]
        self._warming = tf.reduce_any(flags) if flags else None
        if not self.delay:
            return super().run(dataclasses.replace(inputs, grads=grads))
        pending = [state["pending"] for state in states]
        inner = [{n: v for n, v in state.items() if n != "pending"} for state in states]
        now = dataclasses.replace(inputs, grads=grads, states=inner, step=begun)
        late = dataclasses.replace(now, grads=pending)
        full = tf.equal(begun % self.dense_every, 0) if self.dense_every else None
        if self._warming is None:
            outcome = self.whole.run(late, full)
        else:
            sent_now = self._warming
            outcome = choose(
                sent_now,
                lambda: (self.whole.dense or self.whole.compressed).run(now),
                lambda: self.whole.run(late, full),
                network,
            )
            grads = [[tf.where(sent_now, tf.zeros_like(g), g) for g in b] for b in grads]
        results = [
            (totals, {**state, "pending": bucket})
            for (totals, state), bucket in zip(outcome.results, grads, strict=True)
        ]
        return dataclasses.replace(outcome, results=results)

    @override
    def flush(self, states: Sequence[State], network: Network) -> Outcome:
        """Exchange the residuals; afterwards all workers are at the consensus."""
        self._grads = [[tf.zeros(s.shape) for s in b.layout.specs] for b in self.buckets]
        self._warming = None
        return super().flush(states, network)

    @override
    def before_update(self, consensus: Consensus) -> None:
        """Return from the perturbed point to the consensus."""
        consensus.capture()
        consensus.restore()

    @override
    def after_update(
        self,
        consensus: Consensus,
        states: Sequence[StateVariables],
        rate: tf.Tensor,
        network: Network,
    ) -> None:
        """Store the new consensus and move to the perturbed point."""
        for agreed, own in zip(consensus.agreed, consensus.own, strict=True):
            agreed.assign(own.read_value(), read_value=False)
        consensus.steps.assign_add(1, read_value=False)
        if self._warming is None:
            self._perturb(consensus, states, rate, network.workers)
        else:
            tf.cond(
                self._warming,
                lambda: None,
                lambda: self._perturb(consensus, states, rate, network.workers),
            )

    def _perturb(
        self,
        consensus: Consensus,
        states: Sequence[StateVariables],
        rate: tf.Tensor,
        workers: int,
    ) -> None:
        for bucket, variables, grads in zip(self.buckets, states, self._grads, strict=True):
            specs = bucket.layout.specs
            weights = [tf.cast(consensus.agreed[s.position], tf.float32) for s in specs]
            perturbed = capability(bucket.method, EvaluationPoint)
            if perturbed is None:
                points = weights
            else:
                points = perturbed.point(weights, grads, variables.read(), rate, workers)
            for spec, weight, point in zip(specs, weights, points, strict=True):
                variable = consensus.own[spec.position]
                usable = tf.reduce_all(tf.math.is_finite(point))
                variable.assign(
                    tf.cast(tf.where(usable, point, weight), variable.dtype), read_value=False
                )

    @override
    def to_consensus(
        self, consensus: Consensus, states: Sequence[StateVariables], network: Network
    ) -> None:
        """Set the model's weights to the consensus, where the next step starts."""
        tf.cond(consensus.steps > 0, consensus.restore, lambda: None)
        consensus.steps.assign(0)
