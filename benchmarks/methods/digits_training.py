"""Training of `digits_task.Digits` by simulated workers in this process.

They read shares of each batch, and the loopback answers their exchanges, so a step computes the
same as worker processes with plain SGD. Schedules, and the points at which gradients are computed,
are those of `tf_redsync/step`, for a loopback and without variables.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.loopback_workers import Exchange, Tensors
from benchmarks.methods.digits_task import Digits
from tf_redsync.exchange.capabilities import EvaluationPoint, capability
from tf_redsync.keras import pruning


class Training:
    """The workers.

    Args:
        task: The task.
        method: Exchanges the gradients; tensors that it refuses use its dense method.
        learning_rate: Learning rate of SGD.
        exchange: Exchange of gradients or changes of weights; default: a plain one of the method.

    Attributes:
        weights: The common weights of all workers.
        exchange: Exchange of gradients or changes of weights.
    """

    def __init__(
        self, task: Digits, method, learning_rate: float, exchange: Exchange | None = None
    ):
        self.task, self.method, self.rate = task, method, learning_rate
        self.exchange = exchange or Exchange(method, task.specs, task.workers)
        self.weights = task.weights()
        self.points = [self.weights] * task.workers
        self.pending = [[tf.zeros(s.shape) for s in task.specs]] * task.workers
        self.points_of = tf.function(self._points_of, autograph=False)

    def step(self, rows: tf.Tensor, number: int) -> None:
        """Runs one step of all workers with the examples `rows`, `[workers, batch]`."""
        grads = self.task.grads(self.points, rows)
        if self.method.sync_schedule.local_steps:
            self._local_step(grads, number)
        elif self.method.sync_schedule.own_point or self.method.sync_schedule.delay:
            self._step_at_own_points(grads, number)
        else:
            self._descend(self.exchange.run(grads, number))
            self.points = [self.weights] * self.task.workers

    def prune(self) -> None:
        """Prunes weights if a method waits for that, as `tf_redsync.callbacks.Prune` does."""
        for i, (method, layout) in enumerate((b.method, b.layout) for b in self.exchange.buckets):
            if method.sync_schedule.waits_for:
                weights = {s.position: self.weights[s.position].numpy() for s in layout.specs}
                masks = pruning.magnitude_masks(weights, method.sparsity, "layer")
                state = method.with_masks(layout, list(masks.values()))
                self.exchange.states[i] = [state] * layout.workers
                for position, mask in masks.items():
                    weight = self.weights[position]
                    self.weights[position] = tf.where(mask, weight, tf.zeros_like(weight))
        self.points = [self.weights] * self.task.workers

    def _local_step(self, grads: list[Tensors], number: int) -> None:
        """See `step/local_steps.py`."""
        factor, workers = self.rate * self.task.workers, self.task.workers
        self.points = [
            [w - factor * g for w, g in zip(point, own, strict=True)]
            for point, own in zip(self.points, grads, strict=True)
        ]
        if (number + 1) % self.method.sync_schedule.local_steps == 0:
            changes = [
                [(w - agreed) / workers for w, agreed in zip(point, self.weights, strict=True)]
                for point in self.points
            ]
            totals = self.exchange.run(changes, number // self.method.sync_schedule.local_steps)
            if totals is not None:
                self.weights = [w + t for w, t in zip(self.weights, totals, strict=True)]
            self.points = [self.weights] * workers

    def _step_at_own_points(self, grads: list[Tensors], number: int) -> None:
        """See `step/perturbed_point.py`."""
        warming = number < self.method.sync_schedule.warm_up_steps
        late = self.method.sync_schedule.delay and not warming
        self._descend(self.exchange.run(self.pending if late else grads, number))
        if warming:
            self.points = [self.weights] * self.task.workers
        else:
            self.pending = grads
            self.points = self.points_of(self.weights, grads, self.exchange.states)

    def _points_of(self, weights, grads, states) -> list[Tensors]:
        points = [list(weights) for _ in grads]
        for bucket, own_states in zip(self.exchange.buckets, states, strict=True):
            positions = [s.position for s in bucket.layout.specs]
            for point, own, state in zip(points, grads, own_states, strict=True):
                arguments = [weights[p] for p in positions], [own[p] for p in positions]
                perturbed = capability(bucket.method, EvaluationPoint)
                found = arguments[0]
                if perturbed is not None:
                    found = perturbed.point(*arguments, state, self.rate, self.task.workers)
                for position, tensor in zip(positions, found, strict=True):
                    point[position] = tensor
        return points

    def _descend(self, totals: Tensors | None) -> None:
        if totals is not None:
            self.weights = [w - self.rate * t for w, t in zip(self.weights, totals, strict=True)]


def train(
    task: Digits, method, learning_rate: float, steps: int, exchange: Exchange | None = None
) -> dict[str, Any]:
    """Trains with SGD.

    Args:
        task: The task.
        method: Exchanges the gradients.
        learning_rate: Learning rate of SGD.
        steps: Number of steps.
        exchange: See `Training`.

    Returns:
        `losses` at 20 points of the training; the final `loss` and `accuracy` of the common
        weights; `bits` that a worker contributes to its collectives, per element and step, and
        `sent_bytes` that it sends per step at the costs of ring collectives, both from the requests
        after the first steps; `skipped` steps.
    """
    training, losses = Training(task, method, learning_rate, exchange), []
    for number, rows in enumerate(task.batches(steps)):
        if number == steps // 10:
            training.prune()
        training.step(tf.constant(rows), number)
        if (number + 1) % max(1, steps // 20) == 0:
            losses.append(float(task.scores(training.weights)[0]))
    loss, accuracy = task.scores(training.weights)
    exchange = training.exchange
    counted = max(1, steps - exchange.first_steps)
    return {
        "loss": float(loss),
        "accuracy": float(accuracy),
        "losses": losses,
        "bits": 8 * (exchange.payload - exchange.first_payload) / counted / task.elements,
        "sent_bytes": (exchange.sent - exchange.first_sent) / counted,
        "skipped": exchange.skipped,
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
