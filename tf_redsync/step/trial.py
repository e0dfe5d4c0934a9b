"""`EveryStep`, with a trial in training of whether dense steps are faster after all.

    step   0 1 2 | 3 4 5 6 7 8 ...                | then
    phase  c c c | c d c d c d, `trial_steps` each | c or d, the one with the smaller median

c: compressed. d: dense, which also delivers the residual. Methods whose steps differ by turns, as
ACP-SGD's do (`Method.period`), have whole periods at a time: c c d d c c d d. The time of a step is
the time from one step's first gradient to the next one's, as every worker sees it, averaged over
the workers; the verdict is on the medians of the periods' means. A step after which the exchange
was left out, as a `LossScaleOptimizer` does, is tried again.

What is dense in any case is exchanged outside of the branch: what stands in there is traced, and
optimised by TensorFlow, twice.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import tensorflow as tf
from typing_extensions import override

from tf_redsync.exchange.context import Context
from tf_redsync.exchange.driver import Network, Outcome
from tf_redsync.exchange.layout import Bucket
from tf_redsync.exchange.method import Exchange, Method, State
from tf_redsync.exchange.requests import AllReduce
from tf_redsync.explanation import dense_bytes
from tf_redsync.step.branches import choose
from tf_redsync.step.changing_steps import ChangingSteps, joined, split
from tf_redsync.step.every_step import (
    Grads,
    Inputs,
    Plan,
    dense_plan,
)
from tf_redsync.step.fit_steps import WarmUp
from tf_redsync.step.state_variables import Create, StepTimes

START_UP_STEPS = 3  # the first ones trace, allocate, and find their thresholds
COMPRESSED, DENSE = 1, 2  # verdicts; 0 before there is one


class Trial(ChangingSteps):
    """Compressed and dense exchanges in turn at first, then whichever made the steps shorter.

    Args:
        buckets: The buckets.
        steps: Number of steps of either kind that are measured, rounded up to whole periods.
        create: Makes a variable of which each worker has its own; see `step/state_variables.py`.
        warm_up: A dense warm-up of all methods, which comes before the trial.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        steps: int,
        create: Create,
        warm_up: WarmUp | None = None,
    ):
        super().__init__(buckets, warm_up)
        self.parts = split(self.buckets)
        self.period = math.lcm(*(b.method.period for b in buckets))
        self.turns = -(-steps // self.period)  # of either kind
        self.measured = 2 * self.turns * self.period
        self.end = START_UP_STEPS + self.measured
        self.times = StepTimes(self.measured, create)

    @override
    def run(self, inputs: Inputs) -> Outcome:
        grads, states, network = inputs.grads, inputs.states, inputs.network
        warming, step = self.begun(inputs.step)
        count, verdict = self._judged(grads, network, warming)
        measured = (count >= START_UP_STEPS) & (count < self.end)
        turn = (count - START_UP_STEPS) // self.period
        dense = (measured & tf.equal(turn % 2, 1)) | tf.equal(verdict, DENSE)
        dense = dense if warming is None else dense | warming
        delivered = self.times.delivered.read_value()

        is_dense = self._dense_at(step, states)
        inputs = dataclasses.replace(inputs, step=step)
        outcomes = []
        for part in self.parts:
            own = inputs.of(part.positions)
            compressed = functools.partial(part.run, own, is_dense)
            if part.dense is None:
                outcomes.append(compressed())
            else:
                plan = _delivering([self.buckets[i] for i in part.positions], delivered)
                outcomes.append(
                    choose(dense, functools.partial(plan.run, own), compressed, network)
                )
        outcome = joined(self.parts, outcomes)
        done = dense & (outcome.finite | tf.equal(delivered, 1))
        self.times.delivered.assign(tf.cast(done, tf.int64), read_value=False)
        return outcome

    @override
    def interrupt(self) -> None:
        """Discard the time of the step before."""
        self.times.last.assign(tf.constant(float("nan"), tf.float64), read_value=False)

    @override
    def resumed(self) -> None:
        """Time goes on from now: that of the last step ended with another process."""
        self.times.last.assign(tf.timestamp(), read_value=False)

    def _judged(
        self, grads: Sequence[Grads], network: Network, warming: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Note the time of the last step. Return this one's number, and after the trial a verdict.

        A step that was interrupted keeps its number for the one that comes in its place, and those
        of a warm-up have none.
        """
        times, count = self.times, self.times.count.read_value()
        with tf.control_dependencies([grads[0][0]]):  # of the last layer: it is the first one
            now = tf.timestamp()
        passed = now - times.last.read_value()
        again = (count > 0) & (count <= self.end) & tf.math.is_nan(passed)
        count -= tf.cast(again, tf.int64)
        here = tf.equal(tf.range(self.measured, dtype=tf.int64), count - 1 - START_UP_STEPS)
        seconds = tf.where(here & ~again, passed, times.seconds.read_value())
        times.seconds.assign(seconds, read_value=False)
        times.last.assign(now, read_value=False)
        before = times.verdict.read_value()

        def judge() -> tf.Tensor:
            total = network.all_reduce([tf.cast(seconds, tf.float32)])[0]
            periods = tf.reshape(total / network.workers, [self.turns, 2, self.period])
            medians = tf.sort(tf.reduce_mean(periods, axis=-1), axis=0)[self.turns // 2]
            compressed, dense = medians[0], medians[1]
            verdict = tf.where(dense < compressed, DENSE, COMPRESSED)
            _report(network.rank(), compressed, dense)
            return tf.cast(verdict, tf.int64)

        due = tf.equal(count, self.end) & ~again
        verdict = tf.cond(due, judge, lambda: tf.identity(before))
        times.verdict.assign(verdict, read_value=False)
        following = (
            count + 1 if warming is None else tf.where(warming, tf.zeros_like(count), count + 1)
        )
        times.count.assign(following, read_value=False)
        return count, verdict

    @override
    def bytes_of(self, bucket: Bucket, workers: int) -> float:
        """Of the exchange in use: dense bytes if the trial ended so."""
        if int(self.times.verdict.numpy()) != DENSE:
            return super().bytes_of(bucket, workers)
        return dense_bytes(bucket.layout.specs, workers)


def _delivering(buckets: Sequence[Bucket], delivered: tf.Tensor) -> Plan:
    """The dense exchange of buckets with their residuals, unless these are `delivered`."""

    def run(method: Method, grads: Grads, state: State, ctx: Context) -> Exchange:
        dense = method.dense_exchange(grads, state, ctx)
        return _with_residual(dense, state["residual"], tf.equal(delivered, 1))

    runs = tuple(functools.partial(run, b.method) for b in buckets)
    return dataclasses.replace(dense_plan(buckets), runs=runs)


def _with_residual(exchange: Exchange, residual: list[tf.Tensor], delivered: tf.Tensor) -> Exchange:
    """A dense exchange of one all-reduce that delivers the residual as well.

    Args:
        exchange: Without it.
        residual: What is to be delivered.
        delivered: Bool scalar: whether all of `residual` is 0, so that there is nothing to add.
    """
    request = next(exchange)
    if not isinstance(request, AllReduce) or len(request.tensors) != len(residual):
        raise TypeError("a dense exchange must be one all-reduce of all tensors of its bucket")
    tensors = list(request.tensors)

    def add() -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        sums = [t + r for t, r in zip(tensors, residual, strict=True)]
        return sums, [tf.zeros_like(r) for r in residual]

    contributions, left = tf.cond(delivered, lambda: (tensors, residual), add)
    sums = yield AllReduce(contributions)
    try:
        exchange.send(sums)
    except StopIteration as stop:
        totals, state = stop.value
        return totals, {**state, "residual": left}
    raise TypeError("a dense exchange must be one all-reduce")


def _report(rank: tf.Tensor, compressed: tf.Tensor, dense: tf.Tensor) -> None:
    """Print the outcome of the trial, on one worker."""
    text = "tf_redsync.Auto: a step takes {} s compressed and {} s dense (medians): {} from here on"
    verdict = tf.where(dense < compressed, "dense", "compressed")
    line = tf.strings.format(text, (compressed, dense, verdict))

    def show() -> tf.Tensor:
        tf.print(tf.strings.regex_replace(line, '"', ""))
        return tf.constant(0)

    tf.cond(tf.equal(rank, 0), show, lambda: tf.constant(0))
