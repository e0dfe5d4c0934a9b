"""How many elements of each variable a worker sends in a step: for metrics.

Methods that select elements say in their messages how many there are; a step notes these numbers of
its own message in a variable for each bucket. Nothing is asked of other workers. What methods send
that add up partial sums on the way, or have a code of their own, is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_redsync.exchange.layout import Bucket
from tf_redsync.step.state_variables import process_variable


class Meter:
    """The elements that this worker has sent in the last exchange, by bucket.

    Args:
        buckets: The program's.

    Attributes:
        elements: By a bucket's index, a float32 variable `[tensors]` of this process; -1 for
            unknown.
    """

    def __init__(self, buckets: Sequence[Bucket]):
        self.elements = {
            b.layout.index: process_variable(tf.fill([len(b.layout.specs)], -1.0))
            for b in buckets
            if type(b.method).exchange is not type(b.method).dense_exchange
        }

    def note(
        self,
        buckets: Sequence[Bucket],
        elements: Sequence[tf.Tensor | None],
        full: Sequence[bool],
    ) -> None:
        """Note what a plan has sent.

        Args:
            buckets: The plan's.
            elements: Of each bucket; see `Outcome`.
            full: For each bucket, whether all elements are.
        """
        for bucket, sent, everything in zip(buckets, elements, full, strict=True):
            variable = self.elements.get(bucket.layout.index)
            if variable is None:
                continue
            if sent is None:
                sizes = [float(s.size) if everything else -1.0 for s in bucket.layout.specs]
                sent = tf.constant(sizes)
            variable.assign(tf.cast(sent, tf.float32), read_value=False)
