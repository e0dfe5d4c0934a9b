"""The table that `optimizer.explain()` prints: what happens to every variable."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from typing_extensions import override

from tf_redsync.exchange import driver
from tf_redsync.exchange.layout import Bucket, TensorSpec
from tf_redsync.exchange.requests import AllReduce
from tf_redsync.policy import Assignment
from tf_redsync.tables import aligned


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of `Explanation`: a variable and what happens to it."""

    name: str
    shape: tuple[int, ...]
    elements: int
    bucket: int
    method: str
    how: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What the exchange does with every variable; `str` prints a table.

    Attributes:
        rows: One for each variable, in the model's order.
        workers: Number of workers.
        dense_bytes: Bytes a worker would send in a step without compression.
        bytes_per_step: Bytes a worker sends in a step, after warm-up.
        decision: How `Auto` came to it, if it did.
        replicas: Number of replicas that are one worker together.
        warm_up: How long all is dense at first, in words.
        hints: What is known to cost accuracy.
        carrier: What carries the collectives.
        notes: What methods are not that their names may lead to expect.
    """

    rows: tuple[Row, ...]
    workers: int
    dense_bytes: float
    bytes_per_step: float
    decision: str = ""
    replicas: int = 1
    warm_up: str = ""
    hints: tuple[str, ...] = ()
    carrier: str = ""
    notes: tuple[str, ...] = ()

    @override
    def __str__(self) -> str:
        head = ("variable", "shape", "elements", "bucket", "method", "how", "why")
        table = [head] + [
            (r.name, str(r.shape), f"{r.elements:,}", str(r.bucket), r.method, r.how, r.reason)
            for r in self.rows
        ]
        ratio = self.dense_bytes / self.bytes_per_step if self.bytes_per_step else float("inf")
        total = (
            f"{self.workers} workers, {self.bytes_per_step:,.0f} bytes sent per worker and step, "
            f"dense {self.dense_bytes:,.0f}, ratio {ratio:.1f}"
            if self.workers > 1
            else "1 worker: nothing is sent"
        )
        if self.replicas > 1:
            total = f"dense among the {self.replicas} replicas of a host, then {total}"
        carried = f"collectives: {self.carrier}" if self.carrier else ""
        said = [carried, self.warm_up, self.decision]
        said += [f"note: {note}" for note in self.notes]
        said += [f"accuracy: {hint}" for hint in self.hints]
        return "\n".join([*aligned(table), total, *filter(None, said)])


def explain(
    assignments: Sequence[Assignment],
    buckets: Sequence[Bucket],
    workers: int,
    sent: float,
    decision: str = "",
    replicas: int = 1,
    warm_up: str = "",
    carrier: str = "",
) -> Explanation:
    """Make the table.

    Args:
        assignments: In the model's order.
        buckets: All buckets.
        workers: Number of workers.
        sent: Bytes a worker sends in a step.
        decision: See `Explanation`.
        replicas: See `Explanation`.
        warm_up: See `Explanation`.
        carrier: See `Explanation`.
    """
    rows = {
        spec.position: Row(
            name=spec.name,
            shape=spec.shape,
            elements=spec.size,
            bucket=bucket.layout.index,
            method=type(bucket.method).__name__,
            how=bucket.method.describe(spec),
            reason=assignments[spec.position].reason,
        )
        for bucket in buckets
        for spec in bucket.layout.specs
    }
    return Explanation(
        rows=tuple(rows[i] for i in sorted(rows)),
        workers=workers,
        dense_bytes=dense_bytes([a.spec for a in assignments], workers),
        bytes_per_step=sent,
        decision=decision,
        replicas=replicas,
        warm_up=warm_up,
        carrier=carrier,
        notes=tuple(dict.fromkeys(note for b in buckets for note in b.method.traits.notes)),
    )


def dense_bytes(specs: Sequence[TensorSpec], workers: int) -> float:
    """Bytes a worker sends in a ring all-reduce of all of `specs` as float32."""
    return driver.sent_factor(AllReduce, workers) * sum(s.bytes for s in specs)
