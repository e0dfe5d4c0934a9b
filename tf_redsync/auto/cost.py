"""The cost model: predicts the time of an exchange from its computation and messages.

RedSync's model (section on performance), for tensors of n elements on P workers:

    T_sparse = T_select + latency + bytes sent / rate + P T_decode
    T_dense  =            latency + bytes sent / rate

The paper counts log2(P) latencies for a collective. TensorFlow's collectives run around a ring,
with P - 1 hops for a gather and 2 (P - 1) for a reduce. All requests of a collective are sent when
it begins, so the first hop takes a round trip and each further hop half of one. Computation and
communication are added, without overlap with each other or the backward pass. Predictions therefore
favor dense exchanges, which overlap least. `probe.py` measures the parameters.

Reference: Fang, Fu, Yang, Hsieh (2019), arXiv 1808.04357.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tf_redsync.exchange.layout import BucketLayout
from tf_redsync.exchange.traffic import Message, messages


def hops(kind: str, workers: int) -> int:
    """Return the number of consecutive hops of a collective.

    An all-to-all sends all its messages at once.
    """
    if kind in ("all_to_all", "pair_gather"):
        return min(1, workers - 1)
    return {"all_gather": 1, "all_reduce": 2}[kind] * (workers - 1)


@dataclasses.dataclass(frozen=True)
class Line:
    """Time of one kind of collective: `start + hops * latency + bytes sent / rate`.

    Attributes:
        latency: Seconds per hop.
        rate: Bytes per second that a worker sends.
        start: Seconds before the first hop.
    """

    latency: float
    rate: float
    start: float = 0.0


@dataclasses.dataclass(frozen=True)
class Link:
    """Performance of the collectives between the workers.

    Attributes:
        all_gather, all_reduce, all_to_all: Performance of each kind.
    """

    all_gather: Line
    all_reduce: Line
    all_to_all: Line

    @property
    def pair_gather(self) -> Line:
        """Performance of an all-gather of two workers: one hop of an all-gather."""
        return self.all_gather

    @classmethod
    def of(cls, rate: float, latency: float) -> Link:
        """Return a link with one rate (bytes/s) and latency (s) for all collectives."""
        return cls(*(Line(latency, rate) for _ in range(3)))

    @classmethod
    def with_round_trips(cls, rate: float, seconds: float) -> Link:
        """Return a link with a rate (bytes/s) and a round-trip time (s)."""
        return cls(*(Line(seconds / 2, rate, start=seconds / 2) for _ in range(3)))

    def seconds(self, messages: Sequence[Message], workers: int) -> float:
        """Return the seconds of consecutive collectives."""
        total = 0.0
        for message in messages:
            line: Line = getattr(self, message.kind)
            latencies = line.start + hops(message.kind, workers) * line.latency
            total += latencies + message.sent / line.rate
        return total


@dataclasses.dataclass(frozen=True)
class Work:
    """Computation of a worker for an exchange, in seconds.

    Attributes:
        fixed: Per bucket.
        per_element: Per element of the tensors, such as selection.
        per_element_received: Per element and worker, such as decoding.
    """

    fixed: float = 0.0
    per_element: float = 0.0
    per_element_received: float = 0.0

    def seconds(self, elements: int, workers: int) -> float:
        """Return the seconds for a bucket."""
        return self.fixed + elements * (self.per_element + workers * self.per_element_received)


NO_WORK = Work()


def network_seconds(steps: Sequence[Sequence[Message]], link: Link, workers: int) -> float:
    """Return the mean seconds per step of the collectives."""
    return sum(link.seconds(seen, workers) for seen in steps) / len(steps)


def exchange_seconds(method: Any, layout: BucketLayout, link: Link, work: Work) -> float:
    """Return the predicted seconds of one bucket's exchange.

    Args:
        method: The method.
        layout: The bucket, with the number of workers.
        link: The network.
        work: The method's computation.
    """
    if not layout.specs:
        return 0.0
    network = network_seconds(messages(method, layout), link, layout.workers)
    return network + work.seconds(sum(s.size for s in layout.specs), layout.workers)
