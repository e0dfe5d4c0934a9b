"""Bytes that each method sends on any number of workers, from dry runs of a few.

A dry run of 4,096 workers takes minutes for methods that cut a bucket into as many blocks. But
messages depend on the number of workers P only through a part that is divided by P. Two dry runs
separate it from the rest; `Payload` is the result. It ignores that the blocks of many workers are
rounded to whole elements, and that a sparsifier sends at least one element of each.

Rounds between pairs of workers differ: round r = 0, 1, ... exists with more than 2^r workers, and
its message does not depend on their number. One dry run of very many workers gives all of them. It
ignores the additional round for numbers that are no power of two.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tf_redsync as rs
    from tf_redsync.exchange.layout import TensorSpec
    from tf_redsync.exchange.traffic import Message

TRACED = (8, 64)  # numbers of workers
MOST = 4096  # workers, if a method exchanges in pairs
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
# Payload of a full Ethernet frame, as links and rate limiters count it: without the headers of
# Ethernet, IP and TCP.
PAYLOAD = 1448 / 1514


def bytes_per_second(bits: float) -> float:
    """Returns the bytes of messages per second on a link of a rate in bits per second."""
    return PAYLOAD * bits / 8


def bits_per_second(rate: str) -> float:
    """Returns a rate such as "100mbit" as a number; infinity for "none"."""
    return float("inf") if rate == "none" else float(rate[:-4]) * UNITS[rate[-4:]]


@dataclasses.dataclass(frozen=True)
class Payload:
    """Bytes of one collective as a function of the number of workers.

    Every method's messages have a part that workers share equally and one that each of them sends
    whole: `own + shared / P` bytes for each receiving worker (all-to-all and all-gather), or in all
    (all-reduce).

    Attributes:
        kind: `"all_gather"`, `"all_reduce"`, `"all_to_all"` or `"pair_gather"`.
        own: Bytes that do not depend on the number of workers.
        shared: Bytes that are divided by it.
        least: Smallest number of workers with such a collective.
    """

    kind: str
    own: float
    shared: float
    least: int = 2

    @classmethod
    def through(cls, kind: str, points: Mapping[int, float]) -> Payload:
        """Returns the payload through two points.

        Args:
            kind: Kind of the collective.
            points: Two numbers of workers, and the bytes that a worker sends with each.
        """
        (p, at_p), (q, at_q) = ((w, sent / _copies(kind, w)) for w, sent in points.items())
        shared = (at_p - at_q) / (1 / p - 1 / q)
        return cls(kind, at_p - shared / p, shared)

    def sent(self, workers: int) -> float:
        """Bytes that each of `workers` workers sends."""
        if workers < self.least:
            return 0.0
        return _copies(self.kind, workers) * (self.own + self.shared / workers)


def _copies(kind: str, workers: int) -> float:
    if kind == "pair_gather":
        return 1.0
    return 2 * (workers - 1) / workers if kind == "all_reduce" else workers - 1.0


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A bucket.

    Attributes:
        elements: Number of elements of its tensors.
        steps: Its collectives in each of two steps: some methods alternate.
    """

    elements: int
    steps: tuple[tuple[Payload, ...], ...]


def buckets_of(method: rs.Method, specs: Sequence[TensorSpec]) -> tuple[Bucket, ...]:
    """Returns the buckets that an optimizer would create for a model, and their traffic.

    Args:
        method: Method for the tensors that it does not refuse.
        specs: The model's variables.
    """
    import tf_redsync as rs
    from tf_redsync.exchange import traffic
    from tf_redsync.exchange.layout import make_buckets

    assignments = [(a.spec, a.method) for a in rs.Policy(default=method).assign(specs)]
    found = []
    for few, many in zip(*(make_buckets(assignments, p) for p in TRACED), strict=True):
        steps = [traffic.messages(b.method, b.layout) for b in (few, many)]
        if any(message.kind == "pair_gather" for step in steps[0] for message in step):
            most = dataclasses.replace(many.layout, workers=MOST)
            payloads = tuple(map(_rounds, traffic.messages(many.method, most)))
        else:
            payloads = tuple(itertools.starmap(_payloads, zip(*steps, strict=True)))
        found.append(Bucket(sum(s.size for s in few.layout.specs), payloads))
    return tuple(found)


def _payloads(few: Sequence[Message], many: Sequence[Message]) -> tuple[Payload, ...]:
    """A step's collectives, from dry runs with both numbers of workers."""
    return tuple(
        Payload.through(m.kind, {TRACED[0]: m.sent, TRACED[1]: n.sent})
        for m, n in zip(few, many, strict=True)
    )


def _rounds(messages: Sequence[Message]) -> tuple[Payload, ...]:
    """A step's rounds between pairs."""
    return tuple(Payload(m.kind, m.sent, 0.0, 2**r + 1) for r, m in enumerate(messages))
