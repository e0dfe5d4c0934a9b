"""A plan as text and as JSON, and what it recommends."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tf_redsync.auto import Auto, wins
from tf_redsync.config import Configurable, serialize
from tf_redsync.exchange.method import Method
from tf_redsync.outer import Outer
from tf_redsync.planning.prediction import Plan, Total
from tf_redsync.policy import Policy
from tf_redsync.tables import aligned

LAYERS = ("variable", "shape", "bucket", "method", "how", "sent", "dense ms", "ms", "x", "energy")
TOTALS = ("exchange", "sent", "exchange ms", "step ms", "x")
_LEFT = {"variable", "shape", "method", "how", "exchange"}


@dataclasses.dataclass(frozen=True)
class Advice:
    """What to do.

    Attributes:
        compress: Whether to.
        text: The sentence.
        code: The line for the training script; `None` if it may stay as it is.
    """

    compress: bool
    text: str
    code: str | None


def advise(plan: Plan) -> Advice:
    """Compare whole steps. Compression must win clearly, by the measure of `Auto`."""
    dense, step = plan.step(plan.dense), plan.step(plan.planned)
    computed = f"{_ms(plan.compute)} of it computation"
    if not plan.methods:
        text = f"Stay dense: a step is predicted to take {_ms(dense)}, {computed}."
        if plan.candidates:
            text += " No candidate is clearly faster; `--method` shows the layers by one of them."
        return Advice(False, text, None)
    name = code(_chosen(plan))
    times = f"{_ms(step)} against {_ms(dense)} dense ({_times(dense, step)}), {computed}"
    if not wins(step, dense):
        return Advice(False, f"Stay dense: with {name} a step is predicted to take {times}.", None)
    line = f"optimizer = rs.DistributedOptimizer(optimizer, {name})"
    return Advice(True, f"Use {name}: a step is predicted to take {times}.", line)


def _chosen(plan: Plan) -> Method | Policy | Auto:
    """What to give to the optimizer: the one method that `Auto` chose, else what was planned."""
    if isinstance(plan.policy, Policy):
        return plan.policy if plan.policy.rules else plan.policy.default
    method, *others = plan.methods
    alone = all(la.method == method or method.refuses(la.spec) for la in plan.layers)
    return method if alone and not others else plan.policy


def code(value: Any) -> str:
    """Return Python that makes a method, policy or schedule: what is not a default."""
    if isinstance(value, tuple):
        return f"({', '.join(code(v) for v in value)}{',' if len(value) == 1 else ''})"
    if not isinstance(value, Configurable):
        return repr(value)
    fields = [(f, getattr(value, f.name)) for f in dataclasses.fields(value)]  # type: ignore[arg-type]
    given = [f"{f.name}={code(v)}" for f, v in fields if v != f.default]
    home = "rs.outer" if isinstance(value, Outer) else "rs"
    return f"{home}.{type(value).__name__}({', '.join(given)})"


def render(plan: Plan) -> str:
    """Return the tables and the notes, without the advice."""
    rows = [
        (
            la.spec.name,
            "x".join(map(str, la.spec.shape)) or "scalar",
            str(la.share.bucket),
            type(la.method).__name__,
            la.how,
            f"{la.share.sent:,.0f}",
            f"{1e3 * la.dense.seconds:,.2f}",
            f"{1e3 * la.share.seconds:,.2f}",
            _times(la.dense.seconds, la.share.seconds),
            "-" if la.energy is None else f"{la.energy:.3f}",
        )
        for la in plan.layers
    ]
    lines = _table(LAYERS, rows) + [""]
    totals = (plan.dense, *plan.candidates, plan.planned)
    lines += _table(TOTALS, [_total(plan, t) for t in dict.fromkeys(totals)])
    if plan.planned.longest > 1.001 * plan.planned.seconds:
        longest = _ms(plan.compute + plan.planned.longest)
        lines.append(f"These are means over a round: the step that exchanges takes {longest}.")
    dense, planned = (_ms(total.seconds) for total in plan.doubled)
    same = f"{planned} with the same choice, {dense} dense" if plan.methods else dense
    lines.append(f"The exchange of {2 * plan.measured.workers} workers: {same}.")
    return "\n".join(lines)


def notes(asked: Any, synthetic: bool) -> str:
    """Return what the numbers rest on.

    Args:
        asked: The flags `workers`, `rate`, `latency` and `step_ms`.
        synthetic: Whether the batch was made up.
    """
    lines = [
        f"{asked.workers} workers; each sends {asked.rate} and receives as much at the same time, "
        f"{asked.latency:g} ms a round trip.",
        "The collectives are taken to reach this rate. TensorFlow's over gRPC reach less, so the "
        "network times are lower bounds.",
    ]
    if synthetic:
        lines.append(
            "The gradient is that of random inputs and targets: captured energy of real data "
            "differs. Return (model, (inputs, labels), loss) to see it."
        )
    if asked.step_ms is not None:
        lines.append(f"The computation of a step is taken to be {asked.step_ms:g} ms.")
    return "\n".join(lines)


def as_json(plan: Plan, advice: Advice) -> dict[str, Any]:
    """Return the plan as a structure that JSON can hold; times in seconds."""
    line = plan.measured.link.all_reduce
    return {
        "workers": plan.measured.workers,
        "bytes_per_second": line.rate,
        "latency": line.start + line.latency,
        "compute_seconds": plan.compute,
        "method": serialize(plan.policy),
        "layers": [
            {
                "name": la.spec.name,
                "shape": list(la.spec.shape),
                "elements": la.spec.size,
                "bytes": la.spec.bytes,
                "bucket": la.share.bucket,
                "method": type(la.method).__name__,
                "how": la.how,
                "sent_bytes": la.share.sent,
                "seconds": la.share.seconds,
                "dense_sent_bytes": la.dense.sent,
                "dense_seconds": la.dense.seconds,
                "captured_energy": la.energy,
            }
            for la in plan.layers
        ],
        "dense": _as_json(plan, plan.dense),
        "candidates": [_as_json(plan, t) for t in plan.candidates],
        "planned": _as_json(plan, plan.planned),
        "twice_the_workers": {
            "dense_seconds": plan.doubled[0].seconds,
            "seconds": plan.doubled[1].seconds,
        },
        "advice": dataclasses.asdict(advice),
    }


def _as_json(plan: Plan, total: Total) -> dict[str, Any]:
    return {
        "name": total.name,
        "sent_bytes": total.sent,
        "exchange_seconds": total.seconds,
        "step_seconds": plan.step(total),
        "longest_step_seconds": plan.compute + total.longest,
    }


def _total(plan: Plan, total: Total) -> tuple[str, ...]:
    step = plan.step(total)
    cells = (f"{total.sent:,.0f}", f"{1e3 * total.seconds:,.2f}", f"{1e3 * step:,.2f}")
    return total.name, *cells, _times(plan.step(plan.dense), step)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return aligned((head, *rows), [i for i, title in enumerate(head) if title not in _LEFT])


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"


def _times(dense: float, other: float) -> str:
    return f"{dense / other:.1f}x" if other else "-"
