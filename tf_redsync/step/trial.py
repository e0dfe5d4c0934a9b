"""`ChangingSteps` with a trial that measures whether dense steps are faster.

    step   0 1 2 | 3 4 5 6 7 8 ...                | then
    phase  c c c | c d c d c d, `trial_steps` each | c or d, the one with the smaller median

c is a compressed step, d a dense step, which also delivers the residual. Methods with alternating
steps, such as ACP-SGD (`Traits.period`), run whole periods: c c d d c c d d. Under our strategy all
exchanges in one `strategy.run` are one step, of one kind. The duration of a step is the time from
its first gradient to the first gradient of the next step, averaged over the workers. The verdict
compares the medians of the periods' means. A step is measured again, once, if it is interrupted: a
`LossScaleOptimizer` skips the next exchange, or an evaluation, a save by `Checkpoint` or the end of
an epoch follows.

Buckets of always dense methods are exchanged outside of the branch. TensorFlow traces and optimizes
operations in the branch twice.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence, Set
from typing import Any

import tensorflow as tf
from typing_extensions import override

from tf_redsync.cluster import step_counters
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.driver import Network, Outcome
from tf_redsync.exchange.layout import Bucket
from tf_redsync.exchange.method import Exchange, Method, State
from tf_redsync.exchange.requests import AllReduce
from tf_redsync.explanation import dense_bytes
from tf_redsync.step.branches import choose, compact_cond
from tf_redsync.step.changing_steps import ChangingSteps, merge_outcomes, split_by_density
from tf_redsync.step.exchange_schedule import BucketExchange, Grads, Inputs, Plan
from tf_redsync.step.fit_steps import WarmUp
from tf_redsync.step.state_variables import Create, StepTimes

START_UP_STEPS = 3  # slow first steps: tracing, allocation, threshold search
COMPRESSED, DENSE = 1, 2  # verdicts; 0 before the end of the trial
INTERRUPTED, REPEATED = 1, 2  # the last step; 0 for others


class Trial(ChangingSteps):
    """Alternates compressed and dense exchanges at first, then runs the faster of the two.

    Args:
        buckets: The buckets.
        steps: Number of steps of either kind to measure, rounded up to whole periods.
        create: Creates a per-worker variable; see `step/state_variables.py`.
        warm_up: A dense warm-up of all methods before the trial, or `None`.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        steps: int,
        create: Create,
        warm_up: WarmUp | None = None,
    ):
        super().__init__(buckets, warm_up)
        self.groups = split_by_density(self.buckets)
        self.period = math.lcm(*(b.method.traits.period for b in buckets))
        self.turns = -(-steps // self.period)  # periods of either kind
        self.measured = 2 * self.turns * self.period
        self.end = START_UP_STEPS + self.measured
        self.times = StepTimes(self.measured, create)

    @override
    def run(self, inputs: Inputs) -> Outcome:
        grads, states, network = inputs.grads, inputs.states, inputs.network
        warming, step = self.begun(inputs.step)
        count, verdict = self._measure(grads, network, warming)
        measured = (count >= START_UP_STEPS) & (count < self.end)
        turn = (count - START_UP_STEPS) // self.period
        dense = (measured & tf.equal(turn % 2, 1)) | tf.equal(verdict, DENSE)
        dense = dense if warming is None else dense | warming
        delivered = self.times.delivered.read_value()

        is_dense = self._dense_at(step, states)
        inputs = dataclasses.replace(inputs, step=step)
        outcomes = []
        for group in self.groups:
            group_inputs = inputs.of(group.bucket_indices)
            compressed = functools.partial(group.run, group_inputs, is_dense)
            if group.dense is None:
                outcomes.append(compressed())
            else:
                plan = _residual_plan([self.buckets[i] for i in group.bucket_indices], delivered)
                outcomes.append(
                    choose(dense, functools.partial(plan.run, group_inputs), compressed, network)
                )
        outcome = merge_outcomes(self.groups, outcomes)
        done = dense & (outcome.finite | tf.equal(delivered, 1))
        self.times.delivered.assign(tf.cast(done, tf.int64), read_value=False)
        return outcome

    @override
    def keep_absent(self, outcome: Outcome, states: Sequence[State], present: Set[int]) -> None:
        super().keep_absent(outcome, states, present)
        if any(s.position not in present for b in self.buckets for s in b.layout.specs):
            self.times.delivered.assign(0, read_value=False)  # not those of absent variables

    @override
    def interrupt(self) -> None:
        """Discard the duration of the previous step, unless that step repeated another one.

        Otherwise a trial with an interruption after every step would not end.
        """
        repeated = tf.equal(self.times.interrupted.read_value(), REPEATED)
        marked = tf.where(repeated, tf.constant(REPEATED, tf.int64), INTERRUPTED)
        self.times.interrupted.assign(marked, read_value=False)

    @override
    def resumed(self) -> None:
        """Restart the clock, because the last step began in another process."""
        self.times.last.assign(tf.timestamp(), read_value=False)

    def _measure(
        self, grads: Sequence[Grads], network: Network, warming: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Store the duration of the last step; return this step's number and the verdict.

        Both are int64 scalars. The number of an interrupted step is reused. Steps of a warm-up are
        not counted before the verdict. Further exchanges of a step store nothing.
        """
        times, count = self.times, self.times.count.read_value()
        with tf.control_dependencies([grads[0][0]]):  # the last layer's gradient, computed first
            now = tf.timestamp()
        passed = now - times.last.read_value()
        further, interrupted = self._is_further(), times.interrupted.read_value()
        repeated = (count > 0) & (count <= self.end) & tf.equal(interrupted, INTERRUPTED) & ~further
        marked = tf.where(further, interrupted, REPEATED * tf.cast(repeated, tf.int64))
        times.interrupted.assign(marked, read_value=False)
        reused = repeated | further
        count -= tf.cast(reused, tf.int64)
        is_current = tf.equal(tf.range(self.measured, dtype=tf.int64), count - 1 - START_UP_STEPS)
        seconds = tf.where(is_current & ~reused, passed, times.seconds.read_value())
        times.seconds.assign(seconds, read_value=False)
        times.last.assign(tf.where(further, times.last.read_value(), now), read_value=False)
        before = times.verdict.read_value()
        due = tf.equal(count, self.end) & ~reused
        verdict = tf.cond(due, lambda: self._judge(seconds, network), lambda: tf.identity(before))
        times.verdict.assign(verdict, read_value=False)
        following = count + 1
        if warming is not None:  # a trial that `disable()` interrupts begins again
            following = tf.where(warming & (count < self.end), tf.zeros_like(count), following)
        times.count.assign(following, read_value=False)
        with tf.control_dependencies([now]):  # else the exchange may begin before, on a busy CPU
            return tf.identity(count), verdict

    def _is_further(self) -> tf.Tensor:
        """Return whether this is not the first exchange of its step, a bool scalar."""
        begun = step_counters.begun()
        if begun is None:
            return tf.constant(False)
        last = self.times.begun.read_value()
        self.times.begun.assign(begun, read_value=False)
        return tf.equal(begun, last)

    def _judge(self, seconds: tf.Tensor, network: Network) -> tf.Tensor:
        """Return the verdict on all workers' durations, an int64 scalar, and report it."""
        total = network.all_reduce([tf.cast(seconds, tf.float32)])[0]
        periods = tf.reshape(total / network.workers, [self.turns, 2, self.period])
        medians = tf.sort(tf.reduce_mean(periods, axis=-1), axis=0)[self.turns // 2]
        compressed, dense = medians[0], medians[1]
        _report(network.rank(), compressed, dense)
        return tf.cast(tf.where(dense < compressed, DENSE, COMPRESSED), tf.int64)

    @override
    def bytes_of(self, bucket: Bucket, workers: int) -> float:
        """Return the bytes per step of the exchange in use: dense bytes if dense steps won."""
        if int(self.times.verdict.numpy()) != DENSE:
            return super().bytes_of(bucket, workers)
        return dense_bytes(bucket.layout.specs, workers)


def _residual_plan(buckets: Sequence[Bucket], delivered: tf.Tensor) -> Plan:
    """Return the dense plan that also delivers residuals, unless they are `delivered`."""

    def start(method: Method, grads: Grads, state: State, ctx: Context) -> Exchange:
        dense = method.dense_exchange(grads, state, ctx)
        if method.traits.dense_delivers:
            return dense
        return _with_residual(dense, state["residual"], tf.equal(delivered, 1))

    return Plan(tuple(BucketExchange(b, functools.partial(start, b.method)) for b in buckets))


def _with_residual(exchange: Exchange, residual: list[tf.Tensor], delivered: tf.Tensor) -> Exchange:
    """Return a dense exchange of one all-reduce that also delivers the residual.

    Args:
        exchange: The dense exchange.
        residual: The residual to deliver.
        delivered: Bool scalar: whether the residual is 0, so that it need not be added.
    """
    request = next(exchange)
    if not isinstance(request, AllReduce) or len(request.tensors) != len(residual):
        raise TypeError(
            "`dense_exchange` must be one all-reduce of all tensors of its bucket. Received: "
            f"{request!r:.60}"
        )
    tensors = list(request.tensors)

    def add() -> Any:
        sums = [t + r for t, r in zip(tensors, residual, strict=True)]
        return (sums, [tf.zeros_like(r) for r in residual]), ()

    (contributions, left), _ = compact_cond(delivered, lambda: ((tensors, residual), ()), add)
    sums = yield AllReduce(contributions)
    try:
        exchange.send(sums)
    except StopIteration as stop:
        totals, state = stop.value
        return totals, {**state, "residual": left}
    raise TypeError("`dense_exchange` must be one all-reduce. Received: a second request")


def _report(rank: tf.Tensor, compressed: tf.Tensor, dense: tf.Tensor) -> None:
    """Print the outcome of the trial, on worker 0."""
    text = "tf_redsync.Auto: a step takes {} s compressed and {} s dense (medians): {} from now on"
    verdict = tf.where(dense < compressed, "dense", "compressed")
    line = tf.strings.format(text, (compressed, dense, verdict))

    def show() -> tf.Tensor:
        tf.print(tf.strings.regex_replace(line, '"', ""))
        return tf.constant(0)

    tf.cond(tf.equal(rank, 0), show, lambda: tf.constant(0))
