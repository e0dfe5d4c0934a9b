"""Counts the elements of each variable that a worker sends in a step, for metrics.

Methods that select elements report the numbers with their messages (`AllGather.sent`). A step
stores them in one variable for each bucket, without communication. The numbers of methods that do
not report them, such as those that send partial sums, are unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
        self,
        buckets: Sequence[Bucket],
        elements: Sequence[Callable[[], tf.Tensor] | None],
        full: Sequence[bool],
    ) -> None:
        """Store the number of elements that a plan has sent.

        Args:
            buckets: The buckets of the plan.
            elements: For each bucket, the elements sent; see `Outcome`.
            full: For each bucket, whether its exchange sends all elements.
        """
        for bucket, sent, everything in zip(buckets, elements, full, strict=True):
            variable = self.elements.get(bucket.layout.index)
            if variable is None:
                continue
            if sent is not None:
                count = sent()
            else:
                sizes = [float(s.size) if everything else -1.0 for s in bucket.layout.specs]
                count = tf.constant(sizes)
            variable.assign(tf.cast(count, tf.float32), read_value=False)
