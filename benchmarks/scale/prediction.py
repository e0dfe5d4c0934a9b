"""The prediction of `scale.py`: the time of a training step on any number of workers.

Inputs, all measured on two workers (`benchmarks/scale/worker.py`):

    compute     processor time of a step without an exchange, `update` of it for the inner update
    own         the same of a method's step: compute, select, decode, without handling messages
    decode      for each element and each worker whose whole message is received
    h, c        cost of a collective on a worker's core: for each message, and for each byte sent

and, by dry runs, the bytes that each collective of each bucket sends (`Payload`). A bucket's
collectives, on P workers joined by links of a rate and a latency:

    occupied = sum over collectives of   P h + bytes (c + 1 / rate)
    delay    = sum over collectives of   hops latency

h is half the time of a small collective on two workers: starting one counts as a message.
TensorFlow's collectives run around a ring; only an all-to-all sends its P - 1 messages at once.

A step is a schedule of two resources, the core and the link. The core runs the forward pass (half
as long as the backward pass), then for each bucket its share of the rest, by elements. A bucket's
exchange starts when that share is done and the link is free; the update follows the last exchange.
Workers that share the cores of one machine compute P threads / cores times as long, if that is more
than 1. This is the case in the benchmark's check, but not in real clusters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.scale.scale_methods import NONE
from benchmarks.scale.traffic import Bucket, Payload
from tf_redsync.auto.cost import hops

FORWARD = 1 / 3  # part of forward and backward pass: one product against two for each layer


@dataclasses.dataclass(frozen=True)
class Costs:
    """Costs of a method on a worker.

    Attributes:
        own: Seconds of a core for a step on two workers, without messages.
        decode: Seconds of a core for each element and worker beyond two.
        buckets: In the order of their exchange.
    """

    own: float
    decode: float
    buckets: tuple[Bucket, ...]


@dataclasses.dataclass(frozen=True)
class Software:
    """Costs of a collective on a worker's core.

    Attributes:
        message: Seconds for each message, by kind.
        byte: Seconds for each byte that is sent (and as many received), by kind.
    """

    message: Mapping[str, float]
    byte: Mapping[str, float]

    def seconds(self, collectives: Sequence[Payload], workers: int) -> float:
        """Processor time of collectives on each of `workers` workers.

        A pair exchange is an all-gather of two workers.
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
    """Workers and their network.

    Attributes:
        workers: P.
        rate: Bytes per second of each direction of each link.
        latency: Seconds of an empty message on the link.
        share: Factor by which computation is slower; see `oversubscription`.
        speed: Computation speed of a worker, relative to the measured core.
        burst: Bytes in each step that pass a rate limiter without delay.
    """

    workers: int
    rate: float
    latency: float = 0.0
    share: float = 1.0
    speed: float = 1.0
    burst: float = 0.0


def oversubscription(workers: int, threads: int, cores: int) -> float:
    """Returns the factor by which computation is slower if workers share one machine's cores."""
    return max(1.0, workers * threads / cores)


@dataclasses.dataclass(frozen=True)
class Model:
    """All measurements; `step_seconds` predicts.

    Attributes:
        compute: Seconds of a core for a step without an exchange, including the update.
        update: Seconds of it for the inner update.
        software: Costs of the collectives.
        methods: Costs of each method.
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
        """Predicts a worker's processor time in a step, for any links."""
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
        """Returns the time that a bucket's collectives occupy a worker's link, and their delay.

        Args:
            collectives: The bucket's collectives.
            cluster: The workers.
            burst: Bytes that pass without delay.

        Returns:
            Seconds, seconds, and the rest of `burst`.
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
        report: The report of `--json`.
        software: "unlimited" or "limited": the rate at which the collectives' own costs were
            measured. They are higher on a slow link, which hands over smaller pieces.
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
    """Processor time of a step on two workers without its messages: the mean of both rates."""
    times = [
        row["processor_s"][name]
        - sum(part.seconds(step, 2) / len(b.steps) for b in buckets for step in b.steps)
        for name, part in parts.items()
    ]
    return max(sum(times) / len(times), 0.0)


def crossover(
    model: Model, first: str, second: str, cluster: Cluster, most: int = 4096
) -> int | None:
    """Returns the number of workers from which on `second` is faster than `first`, or `None`.

    Args:
        model: The measurements.
        first: The method that is faster on two workers.
        second: Another one.
        cluster: All but the number of workers.
        most: Largest number of workers to consider.
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
