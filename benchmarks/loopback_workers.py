"""Exchanges of a model among simulated workers in this process, and their bytes.

The schedule is that of `tf_redsync/step`, for the loopback and without variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_redsync.exchange import driver, loopback
from tf_redsync.exchange.capabilities import Waiting, required
from tf_redsync.exchange.layout import Bucket, TensorSpec, make_buckets
from tf_redsync.exchange.method import Method
from tf_redsync.policy import Policy
from tf_redsync.schedules import ExponentialWarmUp
from tf_redsync.step.exchange_schedule import phase_at

Tensors = list[tf.Tensor]


def exchanges(method) -> list[str]:
    """Returns the names of all exchanges of a method."""
    return ["exchange", "dense_exchange", *(name for _, name in method.sync_schedule.phases)]


def first_steps(method) -> int:
    """Returns the number of steps until a method is past its warm-up, phases and stages."""
    ramp = getattr(method, "warm_up", None)
    ramp_steps = 0
    if isinstance(ramp, ExponentialWarmUp):
        ramp_steps = ramp.steps_per_stage * len(ramp.densities)
    until = [until for until, _ in method.sync_schedule.phases]
    return max(
        [method.sync_schedule.warm_up_steps, ramp_steps, *until, *method.sync_schedule.stages]
    )


class Exchange:
    """Exchanges of all workers, step by step.

    Args:
        policy: A method, or a policy that assigns methods. Refused tensors use the dense method.
        specs: The tensors.
        workers: Number of workers.
        warm_up: Number of initial exchanges that are dense for all methods.

    Attributes:
        buckets: The buckets.
        states: Each worker's state for every bucket.
        payload: Bytes that a worker has contributed to its collectives.
        sent: Bytes that a worker has sent, at the costs of ring collectives.
        steps: Number of exchanges.
        first_payload: Part of `payload` from exchanges in a warm-up, in a first phase, or while a
            method was not ready.
        first_sent: The same part of `sent`.
        first_steps: Number of such exchanges.
        skipped: Number of non-finite exchanges.
        peak: Maximum bytes that a worker has sent in one of the other exchanges.
    """

    COUNTERS = (
        "payload", "sent", "steps", "first_payload", "first_sent", "first_steps", "skipped", "peak",
    )  # fmt: skip

    def __init__(self, policy: Any, specs: Sequence[TensorSpec], workers: int, warm_up: int = 0):
        policy = Policy(default=policy) if isinstance(policy, Method) else policy
        pairs = [(a.spec, a.method) for a in policy.assign(specs)]
        self.warm_up = warm_up
        self.buckets: list[Bucket] = make_buckets(pairs, workers)
        self.states = [loopback.initial_states(b.method, b.layout) for b in self.buckets]
        self.runs = [
            {p: loopback.traced_step(b.method, b.layout, p) for p in exchanges(b.method)}
            for b in self.buckets
        ]
        self.payload = self.sent = self.first_payload = self.first_sent = 0.0
        self.steps = self.first_steps = self.skipped = 0
        self.peak = 0.0

    def waits(self, bucket: Bucket, states) -> bool:
        """Whether a method is not ready yet."""
        if not bucket.method.sync_schedule.waits_for:
            return False
        return not required(bucket.method, Waiting).ready(states[0])

    @property
    def fragments(self) -> list[list[int]]:
        """The positions of each fragment's tensors; one fragment if there are none."""
        specs = [s for b in self.buckets for s in b.layout.specs]
        count = max(1, self.buckets[0].method.sync_schedule.fragments)
        return [sorted(s.position for s in specs if s.fragment == i) for i in range(count)]

    def run(self, tensors: Sequence[Tensors], number: int) -> Tensors | None:
        """Exchanges every worker's tensors.

        Args:
            tensors: Tensors of every worker, in the order of the specs.
            number: Number of the exchange, from 0.

        Returns:
            Totals in that order; `None` if they are not finite.
        """
        totals = self._run(tensors, number, range(len(self.buckets)))
        return None if totals is None else [totals[i] for i in range(len(totals))]

    def run_fragment(self, tensors: Sequence[Tensors], number: int, fragment: int) -> Any:
        """Exchanges the tensors of a fragment; returns the totals by position, or `None`."""
        own = [i for i, b in enumerate(self.buckets) if b.layout.specs[0].fragment == fragment]
        return self._run(tensors, number, own)

    def _run(
        self, tensors: Sequence[Tensors], number: int, which: Sequence[int]
    ) -> dict[int, tf.Tensor] | None:
        buckets, old, runs = (
            [own[i] for i in which] for own in (self.buckets, self.states, self.runs)
        )
        exchanges_so_far = number + 1
        warming, number = number < self.warm_up, max(0, number - self.warm_up)
        waiting = [self.waits(b, s) for b, s in zip(buckets, old, strict=True)]
        first = warming or any(waiting) or number < max(first_steps(b.method) for b in buckets)
        outcomes = []
        for bucket, run, states in zip(buckets, runs, old, strict=True):
            specs = bucket.layout.specs
            own = [[t[s.position] for s in specs] for t in tensors]
            phase = "dense_exchange"
            if not warming:
                phase = self._phase(bucket.method, number, any(waiting))
            outcomes.append(run[phase](own, states, number))
        self._count(outcomes, first)
        finite = all(o.finite for o in outcomes)
        if finite:
            for place, outcome in zip(which, outcomes, strict=True):
                self.states[place] = outcome.states
        self._average(which, exchanges_so_far)
        if not finite:
            self.skipped += 1
            return None
        totals: dict[int, tf.Tensor] = {}
        for bucket, outcome in zip(buckets, outcomes, strict=True):
            positions = [s.position for s in bucket.layout.specs]
            totals.update(zip(positions, outcome.totals[0], strict=True))
        return totals

    def _average(self, which: Sequence[int], steps: int) -> None:
        """Sets states to their means over the workers where `SyncSchedule.averages` says so."""
        for place in which:
            bucket, states = self.buckets[place], self.states[place]
            schedule, workers = bucket.method.sync_schedule, len(states)
            if not schedule.average_every or workers == 1:
                continue
            if not schedule.averages_after(tf.constant(steps, tf.int64)):
                continue
            for name in schedule.averages:
                parts = zip(*(s[name] for s in states), strict=True)
                means = [tf.add_n([t / workers for t in part]) for part in parts]
                for state in states:
                    state[name] = list(means)
                size = sum(s.bytes for s in bucket.layout.specs)
                self.payload += size
                self.sent += size * 2 * (workers - 1) / workers

    def flush(self) -> Tensors:
        """Returns the sums of all workers' residuals by an all-reduce, and sets residuals to 0."""
        totals: dict[int, tf.Tensor] = {}
        for bucket, states in zip(self.buckets, self.states, strict=True):
            specs = bucket.layout.specs
            zeros = [tf.zeros(s.shape) for s in specs]
            waiting = [s["residual"] for s in states if s.get("residual")] or [zeros]
            sums = [tf.add_n(list(parts)) for parts in zip(*waiting, strict=True)]
            totals.update(zip([s.position for s in specs], sums, strict=True))
            for state in states:
                if state.get("residual"):
                    state["residual"] = list(zeros)
            self.payload += sum(s.bytes for s in specs)
            self.sent += sum(s.bytes for s in specs) * 2 * (len(states) - 1) / len(states)
        return [totals[i] for i in range(len(totals))]

    def _phase(self, method: Any, number: int, waiting: bool) -> str:
        schedule = method.sync_schedule
        full = schedule.dense_every and number % schedule.dense_every == 0
        if full or number < schedule.warm_up_steps or (schedule.waits_for and waiting):
            return "dense_exchange"
        return phase_at(method, number)

    def _count(self, outcomes, first: bool) -> None:
        payload = sum(int(driver.payload_bytes(r)) for o in outcomes for r in o.requests)
        sent = sum(o.bytes_sent for o in outcomes)
        self.payload += payload
        self.sent += sent
        self.steps += 1
        if first:
            self.first_payload += payload
            self.first_sent += sent
            self.first_steps += 1
        else:
            self.peak = max(self.peak, sent)

    def per_step(self, name: str, after: bool = False) -> float:
        """Returns `payload` or `sent` per step, over all steps or those after the first ones."""
        total, steps = getattr(self, name), self.steps
        if after:
            total, steps = total - getattr(self, f"first_{name}"), steps - self.first_steps
        return total / max(1, steps)
