"""`EveryStep`, with a trial in training of whether dense steps are faster after all.

    step   0 1 2 | 3 4 5 6 7 8 ...          | then
    phase  c c c | c d c d c d, `trial_steps` each | c or d, the one with the smaller median

c: compressed. d: dense, which also delivers the residual. The time of a step is the time from one
step's first gradient to the next one's, as every worker sees it, averaged over the workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_redsync.exchange.driver import Network, Outcome
from tf_redsync.exchange.layout import Bucket
from tf_redsync.exchange.requests import AllReduce
from tf_redsync.exchange.state import Create, StepTimes
from tf_redsync.explanation import dense_bytes
from tf_redsync.methods.base import Exchange
from tf_redsync.programs.branches import choose
from tf_redsync.programs.every_step import EveryStep

SETTLING_STEPS = 3  # the first ones trace, allocate, and find their thresholds
COMPRESSED, DENSE = 1, 2  # verdicts; 0 before there is one


class Trial(EveryStep):
    """See the module's docstring.

    Args:
        buckets: The buckets.
        steps: Number of steps of either kind that are measured.
        create: Makes a variable of which each worker has its own; see `exchange/state.py`.
    """

    def __init__(self, buckets: Sequence[Bucket], steps: int, create: Create):
        super().__init__(buckets)
        self.steps = steps
        self.end = SETTLING_STEPS + 2 * steps  # of the trial
        self.times = StepTimes(2 * steps, create)

    def run(
        self,
        grads: Sequence[list[tf.Tensor]],
        states: Sequence[dict[str, Any]],
        scale: tf.Tensor | None,
        step: tf.Tensor,
        network: Network,
    ) -> Outcome:
        """See `EveryStep`."""
        count = self.times.count.read_value()
        verdict = self._judged(count, grads, network)
        self.times.count.assign_add(1, read_value=False)
        end = self.end
        turn = (count >= SETTLING_STEPS) & (count < end) & tf.equal((count - SETTLING_STEPS) % 2, 1)
        dense = turn | tf.equal(verdict, DENSE)
        # All residuals are delivered by the last step of the trial and, in case that one was
        # skipped, by one more.
        settled = tf.equal(verdict, DENSE) & (count > end)
        arguments = (grads, states, scale, step, network)

        def phase(now_dense: bool) -> Outcome:
            if not now_dense:
                return super(Trial, self).run(*arguments)
            return choose(settled, lambda plain: self._dense(plain, *arguments), network)

        return choose(dense, phase, network)

    def _dense(self, plain: bool, grads, states, scale, step, network) -> Outcome:
        """All buckets densely; unless `plain`, with their residuals."""

        def exchange(method, layout, g, state):
            run = method.dense_exchange(layout, g, state, step, scale)
            if plain or "residual" not in state:
                return run
            return _with_residual(run, state["residual"])

        return self._drive(exchange, lambda method: True, grads, states, network)

    def _judged(self, count: tf.Tensor, grads, network: Network) -> tf.Tensor:
        """Note the time of the last step; after the trial return its verdict."""
        times = self.times
        with tf.control_dependencies([grads[0][0]]):  # of the last layer: it is the first one
            now = tf.timestamp()
        slot = count - 1 - SETTLING_STEPS
        here = tf.equal(tf.range(2 * self.steps, dtype=tf.int64), slot)
        seconds = tf.where(here, now - times.last.read_value(), times.seconds.read_value())
        times.seconds.assign(seconds, read_value=False)
        times.last.assign(now, read_value=False)
        before = times.verdict.read_value()

        def judge() -> tf.Tensor:
            total = network.all_reduce([tf.cast(seconds, tf.float32)])[0]
            turns = tf.reshape(total / network.workers, [self.steps, 2])
            medians = tf.sort(turns, axis=0)[self.steps // 2]
            compressed, dense = medians[0], medians[1]
            verdict = tf.where(dense < compressed, DENSE, COMPRESSED)
            _report(network.rank(), compressed, dense)
            return tf.cast(verdict, tf.int64)

        verdict = tf.cond(tf.equal(count, self.end), judge, lambda: tf.identity(before))
        times.verdict.assign(verdict, read_value=False)
        return verdict

    def bytes_per_step(self, workers: int) -> float:
        """See `EveryStep`. As things are: dense bytes once that is the verdict."""
        if int(self.times.verdict.numpy()) != DENSE:
            return super().bytes_per_step(workers)
        return dense_bytes([s for b in self.buckets for s in b.layout.specs], workers)


def _with_residual(exchange: Exchange, residual: list[tf.Tensor]) -> Exchange:
    """A dense exchange of one all-reduce that delivers the residual as well."""
    request = next(exchange)
    if not isinstance(request, AllReduce) or len(request.tensors) != len(residual):
        raise TypeError("a dense exchange must be one all-reduce of all tensors of its bucket")
    sums = yield AllReduce([t + r for t, r in zip(request.tensors, residual, strict=True)])
    try:
        exchange.send(sums)
    except StopIteration as stop:
        totals, state = stop.value
        return totals, {**state, "residual": [tf.zeros_like(r) for r in residual]}
    raise TypeError("a dense exchange must be one all-reduce")


def _report(rank: tf.Tensor, compressed: tf.Tensor, dense: tf.Tensor) -> None:
    """Print the outcome of the trial, on one worker."""
    text = "tf_redsync.Auto: a step takes {} s compressed and {} s dense (medians): {} from here on"
    verdict = tf.where(dense < compressed, "dense", "compressed")
    line = tf.strings.format(text, (compressed, dense, verdict))

    def show():
        tf.print(tf.strings.regex_replace(line, '"', ""))
        return tf.constant(0)

    tf.cond(tf.equal(rank, 0), show, lambda: tf.constant(0))
