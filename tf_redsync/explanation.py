"""The table of `optimizer.explain()`: the method of every variable, and the traffic."""

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
    """A row of `Explanation`: a variable and its method."""

    name: str
    shape: tuple[int, ...]
    elements: int
    bucket: int
    method: str
    how: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The method of every variable, and the traffic of a step; `str` returns a table.

    Attributes:
        rows: One for each variable, in the model's order.
        workers: Number of workers.
        dense_bytes: Bytes per worker and step without compression.
        bytes_per_step: Bytes per worker and step, after warm-up.
        decision: The measurements and the choice of `Auto`, as text; empty without `Auto`.
        replicas: Number of replicas that form one worker.
        warm_up: The dense warm-up of all methods, as text; empty without one.
        hints: Texts of `AccuracyWarning`s about the settings.
        carrier: Transport of the collectives, such as NCCL.
        notes: Differences of methods from the papers whose names they have.
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
        return "\n".join([*aligned(table), *self.footer])

    @property
    def footer(self) -> list[str]:
        """The lines below the table: traffic, collectives, warm-up, decision, notes and hints."""
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
        text = [total, carried, self.warm_up, self.decision]
        text += [f"note: {note}" for note in self.notes]
        text += [f"accuracy: {hint}" for hint in self.hints]
        return "\n".join(filter(None, text)).splitlines()


def explain(
    assignments: Sequence[Assignment],
    buckets: Sequence[Bucket],
    workers: int,
    sent: float,
) -> Explanation:
    """Build the table; the caller adds decision, replicas, warm-up and carrier.

    Args:
        assignments: The assignments, in the model's order.
        buckets: All buckets.
        workers: Number of workers.
        sent: Bytes per worker and step.
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
        notes=tuple(dict.fromkeys(note for b in buckets for note in b.method.traits.notes)),
    )


def dense_bytes(specs: Sequence[TensorSpec], workers: int) -> float:
    """Return the bytes per worker of a ring all-reduce of `specs` in float32."""
    return driver.COLLECTIVES[AllReduce].factor(workers) * sum(s.bytes for s in specs)
