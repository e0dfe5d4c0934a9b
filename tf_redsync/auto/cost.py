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
import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from typing_extensions import override

from tf_redsync.exchange import driver
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.driver import DryRun, drive
from tf_redsync.exchange.layout import BucketLayout
from tf_redsync.exchange.requests import AllGather, AllReduce, AllToAll, PairGather, Request

KINDS: dict[type, str] = {
    AllGather: "all_gather",
    AllReduce: "all_reduce",
    AllToAll: "all_to_all",
    PairGather: "pair_gather",
}


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
class Message:
    """One collective.

    Attributes:
        kind: `"all_gather"`, `"all_reduce"`, `"all_to_all"` or `"pair_gather"`.
        sent: Bytes that one worker sends; see `driver.sent_bytes`.
    """

    kind: str
    sent: float


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
Steps = tuple[tuple[Message, ...], ...]


def messages(method: Any, layout: BucketLayout, phase: str = "exchange") -> Steps:
    """Return the collectives of one period of an exchange (`Traits.period`), after warm-ups.

    Uses the method's formula if it has one. Otherwise traces a dry run with `layout.workers`
    workers, once for all buckets of equal shapes.

    Args:
        method: The method.
        layout: The bucket.
        phase: `"exchange"`, or `"dense_exchange"`.
    """
    if not layout.specs:
        return ((),) * method.traits.period
    specs = [dataclasses.replace(s, name="", position=i) for i, s in enumerate(layout.specs)]
    return _messages(method, dataclasses.replace(layout, specs=tuple(specs), index=0), phase)


@functools.lru_cache(maxsize=4096)
def _messages(method: Any, layout: BucketLayout, phase: str) -> Steps:
    numbers = [tf.int64.max - n for n in reversed(range(method.traits.period))]
    known = [method.payloads(layout, n) if _has_formula(method, phase) else None for n in numbers]
    formulas = [payloads for payloads in known if payloads is not None]
    if len(formulas) < len(numbers):
        return dry_run(method, layout, numbers, phase)
    factor = functools.partial(driver.sent_factor, workers=layout.workers)
    return tuple(
        tuple(Message(KINDS[kind], factor(kind) * size) for kind, size in payloads)
        for payloads in formulas
    )


def _has_formula(method: Any, phase: str) -> bool:
    """Return whether `payloads` describes this exchange, and not one that a subclass overrides."""
    defined = ({"exchange", "payloads"} & set(vars(cls)) for cls in type(method).__mro__)
    return phase == "exchange" and "payloads" in next(names for names in defined if names)


def dry_run(
    method: Any, layout: BucketLayout, numbers: Sequence[int], phase: str = "exchange"
) -> Steps:
    """Return the collectives of steps of an exchange, from traces that are never executed."""
    steps = []
    with tf.Graph().as_default():
        for number in numbers:
            network = _Recorder(layout.workers)
            grads = [tf.zeros(s.shape, tf.float32) for s in layout.specs]
            step = tf.constant(number, tf.int64)
            run = getattr(method, phase)
            ctx = Context(layout, network.rank(), step)
            drive([run(grads, method.init(layout), ctx)], network)
            steps.append(tuple(network.seen))
    return tuple(steps)


def bytes_sent(steps: Sequence[Sequence[Message]]) -> float:
    """Return the mean bytes per step that one worker sends."""
    return sum(message.sent for seen in steps for message in seen) / len(steps)


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


class _Recorder(DryRun):
    """A dry run that records its requests."""

    def __init__(self, workers: int):
        super().__init__(workers)
        self.seen: list[Message] = []

    def _keep(self, request: Request) -> None:
        sent = driver.sent_bytes(request, self.workers)
        self.seen.append(Message(KINDS[type(request)], float(tf.get_static_value(sent))))

    @override
    def all_gather(self, message: tf.Tensor) -> tf.Tensor:
        self._keep(AllGather(message))
        return super().all_gather(message)

    @override
    def all_reduce(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        self._keep(AllReduce(tensors))
        return super().all_reduce(tensors)

    @override
    def all_to_all(self, messages: tf.Tensor) -> tf.Tensor:
        self._keep(AllToAll(messages))
        return super().all_to_all(messages)

    @override
    def pair_gather(self, message: tf.Tensor, distance: int) -> tf.Tensor:
        self._keep(PairGather(message, distance))
        return super().pair_gather(message, distance)
