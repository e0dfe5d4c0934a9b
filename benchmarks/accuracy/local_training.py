"""Simulated workers that train alone for some steps, each with its own weights.

They share one model and one optimizer, whose variables are set to each worker's values before its
step and read after it. A round ends as in `step/local_steps.py`, and at each evaluation, as `fit`
ends one with each epoch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tensorflow as tf

from benchmarks.accuracy.data import Data
from benchmarks.accuracy.tasks import Settings
from benchmarks.accuracy.training import Training, loss_of, mean_statistics
from tf_redsync.exchange import feedback
from tf_redsync.expressions import Expression


class LocalTraining(Training):
    """The workers; see `Training`. An interrupted row starts over.

    Attributes:
        agreed: The common weights after the last exchange.
        own: Each worker's weights, statistics and optimizer slots; empty in a dense warm-up.
        rounds: Number of exchanges of changes.
    """

    local = True

    def __init__(self, settings: Settings, found: Data, what: Expression, seed: int):
        super().__init__(settings, found, what, seed)
        schedule = self.policy.default.sync_schedule
        if schedule.masks_local_momentum:
            raise ValueError(
                "this method clears each worker's momentum where a change was sent: give --real. "
                f"Received: {type(self.policy.default).__name__}"
            )
        self.length, self.outer = schedule.local_steps, schedule.outer
        self.slots = {
            name: [tf.zeros(v.shape) for v in self.variables]
            for name in (self.outer.slots if self.outer else ())
        }
        self.rounds = self._since = 0
        self.agreed: list[tf.Tensor] = []
        self.own: list[list[tf.Tensor]] = []
        self._alone = tf.function(self._step_alone, autograph=False)

    def _everything(self) -> list[Any]:
        return [*self.variables, *self.statistics, *self.optimizer.variables]

    def _read(self) -> list[tf.Tensor]:
        return [tf.identity(tf.convert_to_tensor(v)) for v in self._everything()]

    def _set(self, values) -> None:
        for variable, value in zip(self._everything(), values, strict=True):
            variable.assign(value)

    def _step_alone(self, x, y):
        """Runs one worker's step; returns its loss."""
        weights = [tf.convert_to_tensor(v) for v in self.variables]
        start = [tf.convert_to_tensor(v) for v in self.statistics]
        with tf.GradientTape() as tape:
            tape.watch(weights)
            logits, moved = self.model.stateless_call(weights, start, x, training=True)
            loss = loss_of(y, logits)
        gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, weights)]
        if self.settings.clip_norm is not None:
            scale = feedback.local_clip_scale(gradients, self.settings.clip_norm, 1)
            gradients = feedback.scaled(gradients, scale)
        self._update(gradients, moved)
        return loss

    def step(self) -> None:
        """Runs one step of all workers, and the exchange if it ends a round."""
        if self.number < self.exchange.warm_up:
            super().step()
            return
        workers = self.settings.workers
        if not self.own:
            self.own = [self._read() for _ in range(workers)]
            self.agreed = self.own[0][: len(self.variables)]
        losses = []
        for rank, (x, y) in enumerate(zip(*self.examples(self.number), strict=True)):
            self._set(self.own[rank])
            losses.append(self._alone(x, y))
            self.own[rank] = self._read()
        self._losses.append(tf.add_n(losses) / workers)
        self.number += 1
        self._since += 1
        self._exchange()

    def _exchange(self) -> None:
        """Ends the round if it is complete."""
        if self._since == self.length or self.number in self.settings.evaluated_at:
            self._end_round()

    def _end_round(self) -> None:
        workers, count = self.settings.workers, len(self.variables)
        changes = [
            [(w - a) / workers for w, a in zip(own[:count], self.agreed, strict=True)]
            for own in self.own
        ]
        means = self.exchange.run(changes, self.exchange.warm_up + self.rounds)
        if means is not None:
            if self.outer is not None:
                rounds = tf.constant(self.rounds, tf.int64)
                means, self.slots = self.outer.step(means, self.slots, rounds)
            self.agreed = [a + m for a, m in zip(self.agreed, means, strict=True)]
        end = count + len(self.statistics)
        statistics = mean_statistics([own[count:end] for own in self.own])
        self.own = [[*self.agreed, *statistics, *own[end:]] for own in self.own]
        self._set(self.own[0])  # for an evaluation
        self.rounds, self._since = self.rounds + 1, 0

    def results(self) -> dict[str, Any]:
        """See `Training`: bits and bytes are per step, not per round."""
        found, exchange = super().results(), self.exchange
        after = exchange.steps - exchange.first_steps
        for name, exchanges, steps in (
            ("", exchange.steps, self.number),
            ("_after", after, self.number - exchange.warm_up),
        ):
            for what in ("bits", "sent_bytes"):
                found[what + name] *= exchanges / max(1, steps)
        return found

    def save(self, path: Path, name: str) -> None:
        """Does nothing: unfinished rows are not saved."""

    def restore(self, path: Path, name: str) -> bool:
        """See `save`."""
        return False


class StreamingTraining(LocalTraining):
    """Exchanges the model's fragments in turn, each `delay` steps late.

    A fragment is exchanged when it arrives. All of them are exchanged before an evaluation; the
    peak is that of the other steps.
    """

    def __init__(self, settings: Settings, found: Data, what: Expression, seed: int):
        super().__init__(settings, found, what, seed)
        self.fragments = self.exchange.fragments
        self.renewed = [0] * len(self.fragments)
        self._moving: dict[int, list[dict[int, tf.Tensor]]] = {}
        self._sent = 0.0

    def _exchange(self) -> None:
        schedule, peak = self.policy.default.sync_schedule, self.exchange.peak
        for number, positions in enumerate(self.fragments):
            if not positions:
                continue
            age = (self._since - schedule.offset(number)) % schedule.local_steps
            if age == 0:
                self._moving[number] = [
                    {p: (own[p] - self.agreed[p]) / len(self.own) for p in positions}
                    for own in self.own
                ]
            if age == schedule.delay and number in self._moving:
                self._renew(number, self._moving.pop(number), schedule.mixing)
                peak = max(peak, self.exchange.sent - self._sent)
            self._sent = self.exchange.sent
        if self.number in self.settings.evaluated_at:
            self._end_round()
            self._moving, self.renewed = {}, [n + 1 for n in self.renewed]
            self._sent = self.exchange.sent
        self.exchange.peak = peak

    def _renew(self, number: int, changes: list[dict[int, tf.Tensor]], mixing: float) -> None:
        positions = self.fragments[number]
        warm_up = self.exchange.warm_up
        totals = self.exchange.run_fragment(changes, warm_up + self.rounds, number)
        self.rounds += 1
        if totals is None:
            for own in self.own:
                for p in positions:
                    own[p] = self.agreed[p]
            return
        means = [totals[p] for p in positions]
        if self.outer is not None:
            rounds = tf.constant(self.renewed[number], tf.int64)
            slots = {name: [held[p] for p in positions] for name, held in self.slots.items()}
            means, slots = self.outer.step(means, slots, rounds)
            for name, held in slots.items():
                for p, slot in zip(positions, held, strict=True):
                    self.slots[name][p] = slot
        self.renewed[number] += 1
        for p, mean in zip(positions, means, strict=True):
            self.agreed[p] = self.agreed[p] + mean
            for own in self.own:
                own[p] = mixing * own[p] + (1.0 - mixing) * self.agreed[p]


def make(settings: Settings, found: Data, what: Expression, seed: int) -> Training:
    """Returns the workers for a method; see `Training`."""
    method = what.method
    methods = getattr(method, "methods", (method,))
    local = any(one.sync_schedule.local_steps for one in methods)
    if any(one.sync_schedule.fragments for one in methods):
        return StreamingTraining(settings, found, what, seed)
    return (LocalTraining if local else Training)(settings, found, what, seed)
