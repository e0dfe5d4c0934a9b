"""Methods that fit a budget: the exchange may make a step longer by so much, and no more.

What accuracy they cost is what was measured once; see `tf_redsync/auto/candidates.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tf_redsync.auto.candidates import Candidate, candidates
from tf_redsync.auto.decision import Measured
from tf_redsync.exchange.layout import TensorSpec
from tf_redsync.planning import prediction, report
from tf_redsync.tables import aligned


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
