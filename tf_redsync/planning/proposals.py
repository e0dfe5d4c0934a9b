"""Proposals of methods whose exchange fits a budget, `--max-overhead`.

Their losses of accuracy were measured; see `tf_redsync/auto/candidates.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tf_redsync.auto.candidates import Candidate, candidates
from tf_redsync.auto.decision import Measured
from tf_redsync.exchange.layout import TensorSpec
from tf_redsync.exchange.method import Method
from tf_redsync.planning import prediction, report
from tf_redsync.tables import aligned


@dataclasses.dataclass(frozen=True)
class Proposal:
    """Prediction for a candidate.

    Attributes:
        candidate: The candidate method.
        sent: Mean bytes that a worker sends per step.
        overhead: Mean time of the exchange per step, as a fraction of the step without it.
        unsuited: Reason why it does not suit the model's optimizer, or empty.
    """

    candidate: Candidate
    sent: float
    overhead: float
    unsuited: str


def propose(
    specs: Sequence[TensorSpec],
    measured: Measured,
    compute: float,
    unsuited: Mapping[Method, str],
) -> tuple[Proposal, ...]:
    """Return the predictions for all candidates.

    Args:
        specs: The variables, in the model's order.
        measured: Measurements of the candidates' methods.
        compute: Seconds of a step without an exchange.
        unsuited: Candidates that do not suit the model's optimizer, with the reasons.
    """
    totals = ((c, prediction.total(c.method, specs, measured, compute)) for c in candidates())
    return tuple(
        Proposal(c, t.sent, t.seconds / max(compute, 1e-9), unsuited.get(c.method, ""))
        for c, t in totals
    )


def best(proposals: Sequence[Proposal], most: float) -> Proposal | None:
    """Return the proposal of the lowest perplexity with an overhead of at most `most`, if any.

    Among equal perplexities it has the lowest overhead.
    """
    fitting = [p for p in proposals if p.overhead <= most and not p.unsuited]
    return min(fitting, key=lambda p: (p.candidate.perplexity, p.overhead), default=None)


def render(proposals: Sequence[Proposal], most: float, compute: float) -> str:
    """Return all proposals as a table, and the line for the training script.

    Args:
        proposals: Proposals from `propose`.
        most: Maximum of `Proposal.overhead`.
        compute: Seconds of a step without an exchange.
    """
    chosen, left_out = best(proposals, most), [p for p in proposals if p.unsuited]
    rows = [("method", "sent", "overhead", "perplexity", "")]
    for p in proposals:
        mark = "<- proposed" if p is chosen else "left out" if p.unsuited else p.candidate.remark
        cells = f"{p.sent:,.0f}", f"{p.overhead:.1%}", f"x {p.candidate.perplexity:.2f}"
        rows.append((report.code(p.candidate.method), *cells, mark))
    lines = [
        *aligned(rows, [1, 2, 3]),
        "",
        "sent: mean bytes per worker and step; overhead: mean time of the exchange relative to a "
        f"step of {1e3 * compute:,.1f} ms.",
        "perplexity: final perplexity of a small language model relative to dense training; see "
        "docs/plan.md. Your model may differ: compare two of the methods.",
        *(f"left out: {report.code(p.candidate.method)}: {p.unsuited}" for p in left_out),
        "",
    ]
    if chosen is None:
        least = min((p for p in proposals if not p.unsuited), key=lambda p: p.overhead)
        lines.append(
            f"No method fits {100 * most:.4g}%: {report.code(least.candidate.method)} is closest, "
            f"with {least.overhead:.1%}. More local steps or a larger batch reduce the overhead."
        )
    else:
        remark = f"  # with {chosen.candidate.remark}" if chosen.candidate.remark else ""
        method = report.code(chosen.candidate.method)
        lines.append(f"    optimizer = rs.DistributedOptimizer(optimizer, {method}){remark}")
    return "\n".join(lines)
