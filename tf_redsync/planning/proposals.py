"""Methods that fit a budget: the exchange may make a step longer by so much, and no more.

What accuracy a method costs cannot be predicted. `candidates()` says what was measured once: the
perplexity that a small transformer ended with on characters, on four workers, in 1,000 steps of
AdamW at one learning rate, three seeds each, in units of what dense exchanges ended with
(docs/benchmarks.md, "Bytes for perplexity"; `PowerSGD` and `HalfPrecision` with one seed). Another
model may order them otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tf_redsync import outer
from tf_redsync.auto.decision import Measured
from tf_redsync.exchange.layout import TensorSpec
from tf_redsync.methods import (
    CodedTopK,
    DeMo,
    Dense,
    DiLoCo,
    HalfPrecision,
    LocalSGD,
    Method,
    OneBitAdam,
    PowerSGD,
    SparseLoCo,
)
from tf_redsync.planning import prediction, report
from tf_redsync.tables import aligned


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A method, and what was measured of it.

    Attributes:
        method: The method.
        perplexity: At the end, in units of that of `Dense`.
        remark: What it was measured with, where that is not the optimizer of all.
    """

    method: Method
    perplexity: float
    remark: str = ""


def candidates() -> tuple[Candidate, ...]:
    """Return the methods that are proposed, in the order of what they reached."""
    short = outer.Nesterov(learning_rate=0.7, momentum=0.5)
    found = (
        Candidate(CodedTopK(density=0.03), 0.93, "beta_1 = 0"),
        Candidate(Dense(), 1.0),
        Candidate(HalfPrecision(), 1.0),
        Candidate(OneBitAdam(), 1.0, "Adam, after a dense fifth"),
        Candidate(DeMo(), 1.04, "SGD, at Adam's learning rate"),
        Candidate(PowerSGD(), 1.12),
        Candidate(DiLoCo(steps=15, outer=short), 1.13),
        Candidate(LocalSGD(steps=15), 1.15),
        Candidate(DiLoCo(steps=50, outer=short), 1.21),
        Candidate(SparseLoCo(steps=15, top_k=128), 1.26),
        Candidate(SparseLoCo(steps=50, top_k=128), 1.40),
    )
    return tuple(sorted(found, key=lambda c: c.perplexity))


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A candidate for a model and a network.

    Attributes:
        candidate: The method.
        sent: Bytes that a worker sends in a step, on average.
        overhead: Seconds of the exchange in a step, on average, in units of the step without.
    """

    candidate: Candidate
    sent: float
    overhead: float


def propose(
    specs: Sequence[TensorSpec], measured: Measured, compute: float
) -> tuple[Proposal, ...]:
    """Predict all candidates.

    Args:
        specs: The variables, in the model's order.
        measured: Of the candidates' methods.
        compute: Seconds of a step without an exchange.
    """
    totals = ((c, prediction.total(c.method, specs, measured)) for c in candidates())
    return tuple(Proposal(c, t.sent, t.seconds / max(compute, 1e-9)) for c, t in totals)


def best(proposals: Sequence[Proposal], most: float) -> Proposal | None:
    """Return the one of the lowest perplexity, of those whose overhead is at most `most`, if any.

    Of equal ones that of the lowest overhead.
    """
    fitting = [p for p in proposals if p.overhead <= most]
    return min(fitting, key=lambda p: (p.candidate.perplexity, p.overhead), default=None)


def render(proposals: Sequence[Proposal], most: float, compute: float) -> str:
    """Return all proposals as a table, and the line for the training script.

    Args:
        proposals: What `propose` returned.
        most: The budget, as `Proposal.overhead`.
        compute: Seconds of a step without an exchange.
    """
    chosen = best(proposals, most)
    rows = [("method", "sent", "overhead", "perplexity", "")]
    for p in proposals:
        mark = "<- proposed" if p is chosen else p.candidate.remark
        cells = f"{p.sent:,.0f}", f"{p.overhead:.1%}", f"x {p.candidate.perplexity:.2f}"
        rows.append((report.code(p.candidate.method), *cells, mark))
    lines = [
        *aligned(rows, [1, 2, 3]),
        "",
        "sent: bytes of a worker and step, on average; overhead: of the exchange, on average, of a "
        f"step of {1e3 * compute:,.1f} ms.",
        "perplexity: what a small language model once ended with, in units of dense training; see "
        "docs/plan.md. Yours may differ: train with two of them.",
        "",
    ]
    if chosen is None:
        least = min(proposals, key=lambda p: p.overhead)
        lines.append(
            f"None fits {most:.4%}: {report.code(least.candidate.method)} comes nearest, at "
            f"{least.overhead:.1%}. More local steps, or a larger batch, need less."
        )
    else:
        remark = f"  # with {chosen.candidate.remark}" if chosen.candidate.remark else ""
        method = report.code(chosen.candidate.method)
        lines.append(f"    optimizer = rs.DistributedOptimizer(optimizer, {method}){remark}")
    return "\n".join(lines)
