"""One row of the report: a method and a seed, trained by simulated workers in this process.

Every worker computes the gradients of its own examples at the same weights. The loopback answers
their exchanges, and one inner optimizer of Keras applies the common update. Each worker has its own
statistics of BatchNormalization in a step; their mean is kept, as under tf_redsync's strategy.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.accuracy import bit_budget
from benchmarks.accuracy.data import Data
from benchmarks.accuracy.evaluation import Evaluation
from benchmarks.accuracy.tasks import Settings, examples
from benchmarks.loopback_workers import Exchange
from tf_redsync.exchange import feedback
from tf_redsync.exchange.capabilities import AdamMoments, capability, clipping, dense_start
from tf_redsync.exchange.layout import tensor_spec
from tf_redsync.expressions import Expression
from tf_redsync.keras import conflicts
from tf_redsync.policy import Policy

STATISTICS_STEPS = 100  # 0.9^100 of the statistics of earlier weights remain: 3e-5


def dense_steps(warm_up: Any, total: int) -> int:
    """Returns the number of steps, of `total`, in a dense warm-up of all methods."""
    if warm_up is None:
        return 0
    return warm_up.steps or warm_up.length(total)


def loss_of(labels: Any, logits: Any) -> Any:
    """The mean cross-entropy over examples, and over positions of texts.

    Labels below 0 are ignored.
    """
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(labels, 0), logits)
    counted = tf.cast(labels >= 0, losses.dtype)
    return tf.reduce_sum(losses * counted) / tf.reduce_sum(counted)


def _of_rank(value: Any, rank: int) -> Any:
    """A statistic, or a random state from which a worker derives its own."""
    return value if value.dtype.is_floating else value + tf.constant([0, rank << 20], value.dtype)


def mean_statistics(statistics: Any) -> list[Any]:
    """Returns the means over workers; random states are those of the first one."""
    pairs = zip(*statistics, strict=True)
    return [tf.add_n(v) / len(v) if v[0].dtype.is_floating else v[0] for v in map(list, pairs)]


class Training:
    """The workers.

    Args:
        settings: Settings of all rows.
        found: The data.
        what: The exchange.
        seed: Seed of the weights and of the order of the examples.

    Attributes:
        local: Whether workers take local steps; see `local_training.py`.
        number: Number of steps done.
        curve: Measurements so far: `steps`, `loss`, `metric` on the test set, and `train_loss`, the
            mean since the last evaluation.
        seconds: Wall-clock time so far.
        processor_seconds: Processor time of this process so far.
        commits: Commits that ran the steps, in order, if the caller names them.

    Raises:
        ValueError: for a method whose workers have individual weights, for named arguments that
            only processes support, and for momentum in both the exchange and the inner optimizer.
    """

    local = False

    def __init__(self, settings: Settings, found: Data, what: Expression, seed: int):
        self.settings, self.found, method = settings, found, what.method
        self.policy = method if isinstance(method, Policy) else Policy(default=method)
        for name, value in what.options.items():
            if name not in ("warm_up", "flush", "rate_first", "last_statistics"):
                raise ValueError(f"this argument needs --real. Received: {name}={value}")
        for one in self.policy.methods:
            apart = (
                one.sync_schedule.per_worker_weights
                and bool(one.sync_schedule.local_steps) != self.local
            )
            late = one.sync_schedule.delay and not one.sync_schedule.fragments
            late = late or one.sync_schedule.own_point or one.sync_schedule.intervals
            if apart or late or one.sync_schedule.waits_for:
                raise ValueError(
                    "with this method workers have weights of their own, or wait for a callback: "
                    f"give --real. Received: {type(one).__name__}"
                )
        self.rows = settings.rows(len(found.train[1]), seed)
        self.model = settings.network(found, seed)
        self.variables = list(self.model.trainable_variables)
        self.statistics = list(self.model.non_trainable_variables)
        rate_first = what.options.get("rate_first", False)
        if rate_first and settings.optimizer != "sgd":
            raise ValueError(f"`rate_first` is for SGD. Received: {settings.optimizer}")
        self.optimizer = settings.inner_optimizer(self.policy.default.traits, rate_first=rate_first)
        self._rate = settings.rate() if rate_first else 1.0
        conflicts.check_momentum(self.optimizer, self.policy)
        conflicts.check_adam(self.optimizer, self.policy)
        conflicts.check_sgd(self.optimizer, self.policy)
        self.optimizer.build(self.variables)
        specs = [tensor_spec(v, i) for i, v in enumerate(self.variables)]
        begins = what.options.get("warm_up") or dense_start(self.policy.default)
        warm_up = dense_steps(begins, settings.steps)
        self.flushes = what.options.get("flush", False)
        self.last_statistics = what.options.get("last_statistics", False)
        self.elements = sum(s.size for s in specs)
        self.evaluate = Evaluation(settings, found, self.model)
        self.number, self.seconds, self.processor_seconds = 0, 0.0, 0.0
        self.commits: list[str] = []
        self.curve: dict[str, list[float]] = {
            "steps": [], "loss": [], "metric": [], "train_loss": [],
        }  # fmt: skip
        self._losses: list[Any] = []
        self.compute = tf.function(self._gradients, autograph=False)
        self.apply = tf.function(self._update, autograph=False)
        policy = bit_budget.resolved(self.policy, self, specs)
        self.exchange = Exchange(policy, specs, settings.workers, warm_up)
        self._apply_frozen = tf.function(self._update_frozen, autograph=False)
        self._momenta = [
            spec.position
            for bucket in self.exchange.buckets
            if capability(bucket.method, AdamMoments)
            for spec in bucket.layout.specs
        ]

    def _gradients(self, x, y):
        """Every worker's gradients of its loss divided by the number of workers, as in Keras."""
        weights = [tf.convert_to_tensor(v) for v in self.variables]
        losses, gradients, statistics = [], [], []
        for rank, (own_x, own_y) in enumerate(zip(tf.unstack(x), tf.unstack(y), strict=True)):
            start = [_of_rank(tf.convert_to_tensor(v), rank) for v in self.statistics]
            with tf.GradientTape() as tape:
                tape.watch(weights)
                logits, moved = self.model.stateless_call(weights, start, own_x, training=True)
                loss = loss_of(own_y, logits) / self.settings.workers
            found = [tf.convert_to_tensor(g) for g in tape.gradient(loss, weights)]
            losses.append(loss)
            gradients.append(self._clipped(found))
            statistics.append(moved)
        return tf.add_n(losses), gradients, mean_statistics(statistics)

    def _clipped(self, gradients):
        workers, bound = self.settings.workers, self.settings.clip_norm
        if bound is not None:
            scale = feedback.local_clip_scale(gradients, bound, workers)
            gradients = feedback.scaled(gradients, scale)
        clips = clipping(self.policy.default)
        return feedback.scaled(gradients, clips and clips.clip_scale(gradients, workers))

    def _update(self, totals, statistics):
        self.optimizer.apply(totals, self.variables)
        for variable, value in zip(self.statistics, statistics, strict=True):
            variable.assign(value)

    def _update_frozen(self, totals, statistics):
        """Applies totals that are Adam's momenta, as `keras/slots.py` does."""
        adam, totals = self.optimizer, list(totals)
        t = tf.cast(adam.iterations, tf.float32) + 1.0
        grown = (1.0 - adam.beta_2**t) / (1.0 - adam.beta_2 ** (t - 1.0)) / adam.beta_2
        for position in self._momenta:
            adam._momentums[position].assign(totals[position] / adam.beta_1)
            variance = adam._velocities[position]
            variance.assign(grown * tf.convert_to_tensor(variance))
            totals[position] = tf.zeros_like(totals[position])
        self._update(totals, statistics)

    def examples(self, number):
        """Returns the inputs and labels of a step, for all workers."""
        batches = [
            examples(self.settings, self.found, self.rows, number, worker)
            for worker in range(self.settings.workers)
        ]
        return [tf.constant(np.stack(arrays)) for arrays in zip(*batches, strict=True)]

    def step(self) -> None:
        """Runs one step of all workers."""
        loss, gradients, statistics = self.compute(*self.examples(self.number))
        self._losses.append(loss)
        rate = self._rate(self.number) if callable(self._rate) else self._rate
        gradients = [feedback.scaled(own, tf.cast(rate, tf.float32)) for own in gradients]
        totals = self.exchange.run(gradients, self.number)
        if totals is not None:
            frozen = self._momenta and self.number >= self.exchange.warm_up
            (self._apply_frozen if frozen else self.apply)(totals, statistics)
        self.number += 1

    def run(
        self,
        saved: Path | None = None,
        report: Callable[[Training], None] | None = None,
        name: str = "",
        save_seconds: float = math.inf,
    ) -> dict[str, Any]:
        """Trains to the end.

        Args:
            saved: Path of the state, written after each evaluation and every `save_seconds`.
            report: Called after each evaluation.
            name: Name of the row, stored in the state.
            save_seconds: Interval between saved states.

        Returns:
            The results.

        Raises:
            Diverged: for a loss that is not finite.
        """
        self._clocks = time.perf_counter(), time.process_time()
        for end in self.settings.evaluated_at:
            if end <= self.number:
                continue
            while self.number < end:
                self.step()
                if saved is not None and time.perf_counter() - self._clocks[0] > save_seconds:
                    self._count_time()
                    self.save(saved, name)
            if self.flushes and end == self.settings.steps:
                self.apply(self.exchange.flush(), [tf.constant(v) for v in self.statistics])
            if self.last_statistics and end == self.settings.steps:
                self._settle()
            self._measure()
            self._count_time()
            if saved is not None:
                self.save(saved, name)
            if report is not None:
                report(self)
        return self.results()

    def _count_time(self) -> None:
        """Adds the time since the last call."""
        before, self._clocks = self._clocks, (time.perf_counter(), time.process_time())
        self.seconds += self._clocks[0] - before[0]
        self.processor_seconds += self._clocks[1] - before[1]

    def _settle(self) -> None:
        """Recomputes the statistics of BatchNormalization with the final weights."""
        for number in range(STATISTICS_STEPS):
            _, _, statistics = self.compute(*self.examples(number))
            for variable, value in zip(self.statistics, statistics, strict=True):
                variable.assign(value)

    def _measure(self) -> None:
        scores = self.evaluate()
        self.curve["steps"].append(self.number)
        self.curve["train_loss"].append(float(np.mean([float(x) for x in self._losses])))
        for name, value in scores.items():
            self.curve[name].append(value)
        self._losses = []

    def results(self) -> dict[str, Any]:
        """Returns the fields of a row; see benchmarks/README.md."""
        bits = 8 / self.elements
        exchange = self.exchange
        return {
            "metric": self.curve["metric"][-1],
            "loss": self.curve["loss"][-1],
            "bits": bits * exchange.per_step("payload"),
            "bits_after": bits * exchange.per_step("payload", after=True),
            "sent_bytes": exchange.per_step("sent"),
            "sent_bytes_after": exchange.per_step("sent", after=True),
            "peak_bytes": exchange.peak,
            "first_steps": exchange.first_steps,
            "skipped": exchange.skipped,
            "elements": self.elements,
            "seconds": self.seconds,
            "processor_seconds": self.processor_seconds,
            "curve": self.curve,
        }

    # ------------------------------------------------------------------------------- the state

    def _tensors(self) -> list[Any]:
        variables = [*self.variables, *self.statistics, *self.optimizer.variables]
        return [*variables, *tf.nest.flatten(self.exchange.states)]

    def save(self, path: Path, name: str) -> None:
        """Writes the state of the row `name` atomically."""
        arrays = {str(i): np.asarray(tensor) for i, tensor in enumerate(self._tensors())}
        counters = {name: getattr(self.exchange, name) for name in Exchange.COUNTERS}
        rest = {
            "name": name, "number": self.number, "seconds": self.seconds, "curve": self.curve,
            "processor_seconds": self.processor_seconds, "counters": counters,
            "losses": [float(loss) for loss in self._losses], "commits": self.commits,
            "settings": self.settings.common(self.found),
        }  # fmt: skip
        temporary = path.with_suffix(".part")
        with temporary.open("wb") as file:
            np.savez(file, rest=np.frombuffer(json.dumps(rest).encode(), np.uint8), **arrays)
            file.flush()
            # after a power loss, the rename must not survive without the data
            os.fsync(file.fileno())
        temporary.replace(path)

    def restore(self, path: Path, name: str) -> bool:
        """Resumes from a file of `save` if it belongs to this row; returns whether it does."""
        with np.load(path, allow_pickle=False) as archive:
            rest = json.loads(archive["rest"].tobytes())
            if rest["name"] != name:
                return False
            values = [archive[str(i)] for i in range(len(archive.files) - 1)]
        variables = [*self.variables, *self.statistics, *self.optimizer.variables]
        for variable, value in zip(variables, values, strict=False):
            variable.assign(value)
        states = [tf.constant(value) for value in values[len(variables) :]]
        self.exchange.states = tf.nest.pack_sequence_as(self.exchange.states, states)
        for name, value in rest["counters"].items():
            setattr(self.exchange, name, value)
        self.number, self.curve, self._losses = rest["number"], rest["curve"], rest["losses"]
        self.seconds, self.processor_seconds = rest["seconds"], rest["processor_seconds"]
        self.commits = rest.get("commits", [])
        return True
