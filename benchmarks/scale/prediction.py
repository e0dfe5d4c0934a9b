"""The prediction of `scale.py`: the time of a training step on any number of workers.

What is known, all of it measured on two workers (`benchmarks/scale/worker.py`):

    compute     processor time of a step that exchanges nothing, `update` of it for the inner update
    own         the same of a method's step: compute, select, decode, without handling messages
    decode      for each element and each worker whose message comes in whole
    h, c        what a collective costs a worker's core: for each message, and for each byte sent

and, by dry runs, how many bytes each collective of each bucket sends (`Payload`). A bucket's
collectives, on P workers joined by links of a rate and a latency:

    occupied = sum over collectives of   P h + bytes (c + 1 / rate)
    delay    = sum over collectives of   hops latency

h is half of what a small collective takes on two workers: starting one counts as much as a message.
TensorFlow's collectives run around a ring; only an all-to-all sends its P - 1 messages at a time.

A step is a schedule of two resources, the core and the link. The core runs the forward pass (half
as long as the backward pass), then for each bucket its share of the rest, by elements; a bucket's
exchange starts when that share is done and the link is free; the update comes when everything is
there. Workers that share the cores of one machine compute P threads / cores times as long, if that
is more than 1: true of the benchmark's check, and of no real cluster.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.scale.scale_methods import NONE
from benchmarks.scale.traffic import Bucket, Payload
from tf_redsync.auto.cost import hops

FORWARD = 1 / 3  # of forward and backward pass: one product against two for each layer


@dataclasses.dataclass(frozen=True)
class Costs:
    """What a method costs a worker.

    Attributes:
        own: Seconds of a core for a step on two workers, messages excepted.
        decode: Seconds of a core for each element and worker beyond two.
        buckets: In the order of their exchange.
    """

    own: float
    decode: float
    buckets: tuple[Bucket, ...]


@dataclasses.dataclass(frozen=True)
class Software:
    """What a collective costs a worker's core.

    Attributes:
        message: Seconds for each message, by kind.
        byte: Seconds for each byte that is sent (and as many received), by kind.
    """

    message: Mapping[str, float]
    byte: Mapping[str, float]

    def seconds(self, collectives: Sequence[Payload], workers: int) -> float:
        """Processor time that collectives take each of so many workers.

        A pair's is an all-gather of two workers.
        """
        seconds = 0.0
        for payload in collectives:
            kind, ends = payload.kind, workers
            if kind == "pair_gather":
                kind, ends = "all_gather", 2 if workers >= payload.least else 0
            seconds += ends * self.message[kind] + payload.sent(workers) * self.byte[kind]
        return seconds


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Workers and what joins them.

    Attributes:
        workers: P.
        rate: Bytes a second of each direction of each link.
        latency: Seconds of a message of no bytes on the link.
        share: By which everything that a core does takes longer; see `oversubscription`.
        speed: Of a worker's computation, in units of the core of the measurement.
        burst: Bytes in each step that a rate limiter lets pass unhindered.
    """

    workers: int
    rate: float
    latency: float = 0.0
    share: float = 1.0
    speed: float = 1.0
    burst: float = 0.0


def oversubscription(workers: int, threads: int, cores: int) -> float:
    """Returns how many times longer workers compute because they share one machine's cores."""
    return max(1.0, workers * threads / cores)


@dataclasses.dataclass(frozen=True)
class Model:
    """Everything that was measured; `step_seconds` predicts.

    Attributes:
        compute: Seconds of a core for a step without an exchange, the update included.
        update: Seconds of it for the inner update.
        software: Of the collectives.
        methods: What each method costs.
    """

    compute: float
    update: float
    software: Software
    methods: Mapping[str, Costs]

    def step_seconds(self, name: str, cluster: Cluster) -> float:
        """Predicts the time of a step by a method, the mean of two steps."""
        costs = self.methods[name]
        if not costs.buckets or name == NONE or cluster.workers == 1:
            return self.compute * cluster.share / cluster.speed
        count = max(len(bucket.steps) for bucket in costs.buckets)
        return sum(self._step(costs, i, cluster) for i in range(count)) / count

    def _step(self, costs: Costs, step: int, cluster: Cluster) -> float:
        scale = cluster.share / cluster.speed
        elements = sum(bucket.elements for bucket in costs.buckets)
        received = costs.decode * elements * (cluster.workers - 2)
        forward = FORWARD * (self.compute - self.update)
        between = max(costs.own - forward - self.update, 0.0)
        core = max(costs.own - between - self.update, 0.0) * scale
        link, ready, burst = 0.0, 0.0, cluster.burst
        for bucket in costs.buckets:
            core += between * scale * bucket.elements / elements
            occupied, delay, burst = self.exchange(
                bucket.steps[step % len(bucket.steps)], cluster, burst
            )
            link = max(link, core) + occupied
            ready = max(ready, link + delay)
        return max(core, ready) + (self.update + received) * scale

    def core_seconds(self, name: str, workers: int) -> float:
        """Predicts a worker's processor time in a step, whatever the links."""
        costs = self.methods[name]
        if name == NONE or workers == 1:
            return self.compute
        messages = sum(
            self.software.seconds(step, workers) / len(bucket.steps)
            for bucket in costs.buckets
            for step in bucket.steps
        )
        elements = sum(bucket.elements for bucket in costs.buckets)
        return costs.own + messages + costs.decode * elements * (workers - 2)

    def exchange(
        self, collectives: Sequence[Payload], cluster: Cluster, burst: float = 0.0
    ) -> tuple[float, float, float]:
        """Returns how long a bucket's collectives occupy a worker's link, and their delay.

        Args:
            collectives: The bucket's.
            cluster: The workers.
            burst: Bytes that pass unhindered.

        Returns:
            Seconds, seconds, and what is left of `burst`.
        """
        occupied = delay = 0.0
        for payload in collectives:
            sent = payload.sent(cluster.workers)
            free = min(burst, sent)
            burst -= free
            core = self.software.seconds((payload,), cluster.workers)
            occupied += core * cluster.share + (sent - free) / cluster.rate
            if cluster.workers >= payload.least:
                delay += hops(payload.kind, cluster.workers) * cluster.latency
        return occupied, delay, burst


def model_of(report: Mapping[str, Any], software: str = "unlimited") -> Model:
    """Returns the model of a report of `benchmarks/scale/scale.py`.

    Args:
        report: What `--json` wrote.
        software: "unlimited" or "limited": at which rate the collectives' own costs were measured.
            They are higher on a slow link, which hands over smaller pieces.
    """
    measured = report["calibration"]
    parts = {
        name: Software(
            {kind: seconds / 2 for kind, seconds in measured[name]["collective_s"].items()},
            measured[name]["per_byte_s"],
        )
        for name in ("unlimited", "limited")
    }
    return Model(
        _own(measured["methods"][NONE], (), parts),
        measured["update_s"],
        parts[software],
        {
            name: Costs(_own(row, buckets, parts), row["decode_s"], buckets)
            for name, row in measured["methods"].items()
            for buckets in (tuple(_bucket(b) for b in row["buckets"]),)
        },
    )


def _bucket(saved: Mapping[str, Any]) -> Bucket:
    steps = (tuple(Payload(**payload) for payload in step) for step in saved["steps"])
    return Bucket(saved["elements"], tuple(steps))


def _own(row: Mapping[str, Any], buckets: Sequence[Bucket], parts: Mapping[str, Software]) -> float:
    """Processor time of a step on two workers less its messages: the mean of both rates."""
    times = [
        row["processor_s"][name]
        - sum(part.seconds(step, 2) / len(b.steps) for b in buckets for step in b.steps)
        for name, part in parts.items()
    ]
    return max(sum(times) / len(times), 0.0)


def crossover(
    model: Model, first: str, second: str, cluster: Cluster, most: int = 4096
) -> int | None:
    """Returns from how many workers on `second` is faster than `first`; `None` if it is not.

    Args:
        model: What was measured.
        first: The method that is faster on two workers.
        second: Another one.
        cluster: All but the number of workers.
        most: Number of workers up to which to look.
    """

    def wins(workers: int) -> bool:
        there = dataclasses.replace(cluster, workers=workers)
        return model.step_seconds(second, there) < model.step_seconds(first, there)

    low, high = 2, most
    if wins(low) or not wins(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if wins(middle) else (middle, high)
    return high
