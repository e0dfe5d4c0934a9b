"""What a bucket's exchange takes: in a step on average, and in the step with the most.

    every step exchanges       mean = T                          longest = T
    H local steps, then one    mean = T / H                      longest = T, of all buckets at once
    fragments                  the same                          longest = T, of one bucket alone
    fragments, in D parts      mean = D T(part) / H              longest = T(part)

with T what the cost model says of a bucket's messages and computation. Nothing overlaps: with one
processor for a worker the collectives of a part hardly do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tf_redsync.auto import cost
from tf_redsync.auto.decision import Measured
from tf_redsync.exchange.layout import Bucket, BucketLayout, TensorSpec
from tf_redsync.exchange.method import Method
from tf_redsync.step.streaming import Fragment


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A bucket's exchange.

    Attributes:
        sent: Bytes that a worker sends in a step, on average.
        network: Seconds of the network in a step, on average.
        computed: Seconds of computation in a step, on average.
        longest: Seconds of both in the step that has the most.
        alone: Whether other buckets have theirs in other steps.
    """

    sent: float
    network: float
    computed: float
    longest: float
    alone: bool


def of_bucket(bucket: Bucket, measured: Measured) -> Exchange:
    """Predict a bucket's exchange.

    Args:
        bucket: The bucket.
        measured: The network, and what the bucket's method computes.
    """
    method, schedule, workers = bucket.method, bucket.method.sync_schedule, measured.workers
    parts = schedule.delay if schedule.fragments else 0
    served = Fragment(bucket).chunk if parts else bucket
    specs, share = served.layout.specs, max(1, parts) / steps_between(method)
    messages = cost.messages(method, BucketLayout(specs, workers))
    network = cost.network_seconds(messages, measured.link, workers)
    work = measured.work.get(method, cost.NO_WORK)
    computed = work.seconds(sum(s.size for s in specs), workers)
    return Exchange(
        cost.bytes_sent(messages) * share,
        network * share,
        computed * share,
        network + computed,
        schedule.fragments > 0,
    )


def longest(exchanges: Sequence[Exchange]) -> float:
    """Return the seconds of all buckets' exchanges in the step that has the most."""
    together = sum(e.longest for e in exchanges if not e.alone)
    return together + max((e.longest for e in exchanges if e.alone), default=0.0)


def steps_between(method: Method) -> int:
    """Return the steps from one exchange to the next."""
    return max(1, method.sync_schedule.local_steps)


def sent(method: Method, specs: tuple[TensorSpec, ...], workers: int) -> float:
    """Return the bytes that a worker sends in a step for some tensors, on average."""
    messages = cost.messages(method, BucketLayout(specs, workers))
    return cost.bytes_sent(messages) / steps_between(method)
