"""Counts the elements of each variable that a worker sends in a step, for metrics.

Methods that select elements report the numbers with their messages (`AllGather.sent`). A step
stores them in one variable for each bucket, without communication. The numbers of methods that do
not report them, such as those that send partial sums, are unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_redsync.exchange.capabilities import always_dense
from tf_redsync.exchange.layout import Bucket
from tf_redsync.step.state_variables import process_variable


class Meter:
    """The number of elements that this worker sent in the last exchange, by bucket.

    Args:
        buckets: The buckets of the schedule.

    Attributes:
        elements: By bucket index, a float32 variable `[tensors]` of this process; -1 for unknown.
    """

    def __init__(self, buckets: Sequence[Bucket]):
        self.elements = {
            b.layout.index: process_variable(tf.fill([len(b.layout.specs)], -1.0))
            for b in buckets
            if not always_dense(b.method)
        }

    def note(
        self, exchanges: Sequence[Any], elements: Sequence[Callable[[], tf.Tensor] | None]
    ) -> None:
        """Store the number of elements that a plan has sent.

        Args:
            exchanges: The `BucketExchange`s of the plan.
            elements: For each of them, the elements sent; see `Outcome`.
        """
        for exchange, sent in zip(exchanges, elements, strict=True):
            layout = exchange.bucket.layout
            variable = self.elements.get(layout.index)
            if variable is None:
                continue
            if sent is not None:
                count = sent()
            else:
                sizes = [float(s.size) if exchange.sends_all else -1.0 for s in layout.specs]
                count = tf.constant(sizes)
            variable.assign(tf.cast(count, tf.float32), read_value=False)
