"""Training of `digits_task.Digits` by workers in this process.

They read shares of each batch, and the loopback answers their exchanges, so a step computes what
worker processes with plain SGD would. When something is exchanged, and where the workers compute
their gradients, is what `tf_redsync/programs` does, for a loopback and without variables.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.methods.digits_task import Digits
from tf_redsync.exchange import loopback, wire
from tf_redsync.exchange.layout import Bucket, make_buckets
from tf_redsync.keras import pruning
from tf_redsync.policy import Policy
from tf_redsync.programs.plan import phase_at

Tensors = list[tf.Tensor]


def exchanges(method) -> list[str]:
    """Returns the names of all exchanges that a method goes through."""
    return ["exchange", "dense_exchange", *(name for _, name in method.cadence.phases)]


def first_steps(method) -> int:
    """Returns the number of steps until a method has gone through its warm-up and its phases."""
    return max([method.cadence.warm_up_steps, *(until for until, _ in method.cadence.phases)])


class Training:
    """The workers.

    Args:
        task: What they train.
        method: Exchanges the gradients; tensors that it refuses go to its dense method.
        learning_rate: Of SGD.

    Attributes:
        weights: Those that all workers agree on.
        first_steps: Number of exchanges that were dense because of a warm-up or because methods
            waited for something, or that were of a first phase.
        payload: Bytes that a worker has contributed to its collectives after these.
        sent: Bytes that a worker has sent after these, at the costs of ring collectives.
        skipped: Number of exchanges that were not finite.
    """

    def __init__(self, task: Digits, method, learning_rate: float):
        self.task, self.method, self.rate = task, method, learning_rate
        pairs = [(a.spec, a.method) for a in Policy(default=method).assign(task.specs)]
        self.buckets = make_buckets(pairs, task.workers)
        self.states = [loopback.initial_states(b.method, b.layout) for b in self.buckets]
        self.runs = [
            {p: loopback.traced_step(b.method, b.layout, p) for p in exchanges(b.method)}
            for b in self.buckets
        ]
        self.weights = task.weights()
        self.points = [self.weights] * task.workers
        self.pending = [[tf.zeros(s.shape) for s in task.specs]] * task.workers
        self.payload = self.sent = 0.0
        self.skipped = self.first_steps = 0
        self.points_of = tf.function(self._points_of, autograph=False)

    def step(self, rows: tf.Tensor, number: int) -> None:
        """One step of all workers with the examples `rows`, `[workers, batch]`."""
        grads = self.task.grads(self.points, rows)
        if self.method.cadence.local_steps:
            self._local_step(grads, number)
        elif self.method.cadence.own_point or self.method.cadence.delay:
            self._step_at_own_points(grads, number)
        else:
            self._descend(self._exchange(grads, number))
            self.points = [self.weights] * self.task.workers

    def prune(self) -> None:
        """Prunes weights where a method waits for that, as `tf_redsync.callbacks.Prune` does."""
        for i, (method, layout) in enumerate((b.method, b.layout) for b in self.buckets):
            if method.cadence.waits_for:
                weights = {s.position: self.weights[s.position].numpy() for s in layout.specs}
                masks = pruning.magnitude_masks(weights, method.sparsity, "layer")
                state = method.with_masks(layout, list(masks.values()))
                self.states[i] = [state] * layout.workers
                for position, mask in masks.items():
                    weight = self.weights[position]
                    self.weights[position] = tf.where(mask, weight, tf.zeros_like(weight))
        self.points = [self.weights] * self.task.workers

    def _waits(self, bucket: Bucket, states) -> bool:
        return bool(bucket.method.cadence.waits_for and not bucket.method.ready(states[0]))

    def _local_step(self, grads: list[Tensors], number: int) -> None:
        """See `programs/local_steps.py`."""
        factor, workers = self.rate * self.task.workers, self.task.workers
        self.points = [
            [w - factor * g for w, g in zip(point, own, strict=True)]
            for point, own in zip(self.points, grads, strict=True)
        ]
        if (number + 1) % self.method.cadence.local_steps == 0:
            changes = [
                [(w - agreed) / workers for w, agreed in zip(point, self.weights, strict=True)]
                for point in self.points
            ]
            totals = self._exchange(changes, number // self.method.cadence.local_steps)
            if totals is not None:
                self.weights = [w + t for w, t in zip(self.weights, totals, strict=True)]
            self.points = [self.weights] * workers

    def _step_at_own_points(self, grads: list[Tensors], number: int) -> None:
        """See `programs/own_points.py`."""
        warming = number < self.method.cadence.warm_up_steps
        late = self.method.cadence.delay and not warming
        self._descend(self._exchange(self.pending if late else grads, number))
        if warming:
            self.points = [self.weights] * self.task.workers
        else:
            self.pending = grads
            self.points = self.points_of(self.weights, grads, self.states)

    def _points_of(self, weights, grads, states) -> list[Tensors]:
        points = [list(weights) for _ in grads]
        for bucket, own_states in zip(self.buckets, states, strict=True):
            positions = [s.position for s in bucket.layout.specs]
            for point, own, state in zip(points, grads, own_states, strict=True):
                arguments = [weights[p] for p in positions], [own[p] for p in positions]
                found = bucket.method.point(*arguments, state, self.rate, self.task.workers)
                for position, tensor in zip(positions, found, strict=True):
                    point[position] = tensor
        return points

    def _descend(self, totals: Tensors | None) -> None:
        if totals is not None:
            self.weights = [w - self.rate * t for w, t in zip(self.weights, totals, strict=True)]

    def _exchange(self, tensors: list[Tensors], number: int) -> Tensors | None:
        """Totals in the order of the weights; `None` if they are not finite."""
        waiting = [self._waits(b, s) for b, s in zip(self.buckets, self.states, strict=True)]
        first = any(waiting) or number < max(first_steps(b.method) for b in self.buckets)
        self.first_steps += first
        outcomes = []
        for bucket, run, states in zip(self.buckets, self.runs, self.states, strict=True):
            method, specs = bucket.method, bucket.layout.specs
            cadence = method.cadence
            full = cadence.dense_every and number % cadence.dense_every == 0
            waits = cadence.waits_for and any(waiting)
            dense = full or number < cadence.warm_up_steps or waits
            phase = "dense_exchange" if dense else phase_at(method, number)
            own = [[t[s.position] for s in specs] for t in tensors]
            outcomes.append(run[phase](own, states, number))
        if not first:
            self.payload += sum(int(wire.payload_bytes(r)) for o in outcomes for r in o.requests)
            self.sent += sum(o.bytes_sent for o in outcomes)
        if not all(o.finite for o in outcomes):
            self.skipped += 1
            return None
        self.states = [o.states for o in outcomes]
        totals: dict[int, tf.Tensor] = {}
        for bucket, outcome in zip(self.buckets, outcomes, strict=True):
            positions = [s.position for s in bucket.layout.specs]
            totals.update(zip(positions, outcome.totals[0], strict=True))
        return [totals[i] for i in range(len(totals))]


def train(task: Digits, method, learning_rate: float, steps: int) -> dict[str, Any]:
    """Trains with SGD.

    Args:
        task: The task.
        method: Exchanges the gradients.
        learning_rate: Of SGD.
        steps: How many.

    Returns:
        `losses` of 20 times during the training, `loss` and `accuracy` at its end, of the weights
        that all agree on; `bits` that a worker contributes to its collectives, per element and
        step, and `sent_bytes` that it sends per step at the costs of ring collectives, both from
        the requests after the first steps; `skipped` steps.
    """
    training, losses = Training(task, method, learning_rate), []
    for number, rows in enumerate(task.batches(steps)):
        if number == steps // 10:
            training.prune()
        training.step(tf.constant(rows), number)
        if (number + 1) % max(1, steps // 20) == 0:
            losses.append(float(task.scores(training.weights)[0]))
    loss, accuracy = task.scores(training.weights)
    counted = max(1, steps - training.first_steps)
    return {
        "loss": float(loss),
        "accuracy": float(accuracy),
        "losses": losses,
        "bits": 8 * training.payload / counted / task.elements,
        "sent_bytes": training.sent / counted,
        "skipped": training.skipped,
    }


def train_over_seeds(
    method, learning_rate: float, steps: int, seeds: int, workers: int, batch: int = 32
) -> dict[str, float]:
    """Trains `Digits` once for each seed from 0 on, as `train` does.

    Returns:
        The geometric mean of `loss`; the means of `accuracy`, `bits` and `sent_bytes`.
    """
    results = [
        train(Digits(workers, batch, seed), method, learning_rate, steps) for seed in range(seeds)
    ]
    means = {k: float(np.mean([r[k] for r in results])) for k in ("accuracy", "bits", "sent_bytes")}
    return {"loss": float(np.exp(np.mean([np.log(r["loss"]) for r in results]))), **means}
