"""When to exchange what.

`EveryStep` exchanges all buckets in every step, a method's dense warm-up first. Branches depend on
the step alone, which is equal on all workers: a branch around a collective on anything else would
deadlock.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_redsync.exchange import wire
from tf_redsync.exchange.driver import DryRun, Network, Outcome, drive
from tf_redsync.exchange.layout import Bucket


class EveryStep:
    """One exchange a step.

    Args:
        buckets: The buckets, in the order in which they are exchanged.
    """

    def __init__(self, buckets: Sequence[Bucket]):
        self.buckets = tuple(buckets)

    def run(
        self,
        grads: Sequence[list[tf.Tensor]],
        states: Sequence[dict[str, Any]],
        scale: tf.Tensor | None,
        step: tf.Tensor,
        network: Network,
    ) -> Outcome:
        """Exchange one step's gradients.

        Args:
            grads: For every bucket, its float32 gradients.
            states: For every bucket, its state.
            scale: A factor for all gradients or `None`.
            step: int64 scalar, number of exchanges so far.
            network: What carries the requests.

        Returns:
            For every bucket `(totals, new_state)`; the agreed finiteness; bytes sent.
        """
        alone = network.workers == 1  # nothing to compress for
        layouts = [dataclasses.replace(b.layout, rank=network.rank()) for b in self.buckets]

        def run_phase(warming: bool) -> Outcome:
            exchanges, looked_at = [], []
            for i, (layout, g, state) in enumerate(zip(layouts, grads, states, strict=True)):
                method = self.buckets[i].method
                dense = alone or (warming and method.warm_up_steps)
                phase = method.dense_exchange if dense else method.exchange
                exchanges.append(phase(layout, g, state, step, scale))
                if method.totals_may_overflow and not dense:
                    looked_at.append(i)
            outcome = drive(exchanges, network)
            totals = [total for i in looked_at for total in outcome.results[i][0]]
            outcome.finite &= wire.totals_are_finite(totals)
            return outcome

        warm_up_steps = self.warm_up_steps
        if alone or not warm_up_steps:
            return run_phase(warming=False)

        def warm_up():
            return _as_tensors(run_phase(warming=True))

        def exchange():
            return _as_tensors(run_phase(warming=False))

        if not network.in_branches:  # run both, keep one
            kept, dropped = warm_up(), exchange()
            return Outcome(*tf.cond(step < warm_up_steps, lambda: kept, lambda: dropped))
        return Outcome(*tf.cond(step < warm_up_steps, warm_up, exchange))

    def bytes_per_step(self, workers: int) -> float:
        """Bytes one worker sends in a step after warm-up, from a trace that is never executed.

        The mean of an even and an odd step, for methods that take turns.
        """
        if workers == 1:
            return 0.0
        sent = 0.0
        with tf.Graph().as_default():
            for bucket, number in itertools.product(self.buckets, (-1, 0)):
                method, layout = bucket.method, bucket.layout
                grads = [tf.zeros(s.shape, tf.float32) for s in layout.specs]
                last = tf.constant(tf.int64.max + number, tf.int64)
                exchange = method.exchange(layout, grads, method.init(layout), last, None)
                sent += drive([exchange], DryRun(workers)).bytes_sent
        return float(sent) / 2

    @property
    def warm_up_steps(self) -> int:
        """Length of the dense warm-up.

        Raises:
            ValueError: when methods ask for dense warm-ups of different lengths.
        """
        lengths = {b.method.warm_up_steps for b in self.buckets} - {0}
        if len(lengths) > 1:
            raise ValueError(
                f"`DenseWarmUp.steps` must be the same in all methods. Received: {sorted(lengths)}"
            )
        return lengths.pop() if lengths else 0


def _as_tensors(outcome: Outcome):
    return outcome.results, outcome.finite, tf.cast(outcome.bytes_sent, tf.float64)
