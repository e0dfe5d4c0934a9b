"""Report of a plan: text, JSON, plot and recommendation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tf_redsync.auto import Auto, wins
from tf_redsync.codings import IndexCoding, ValueCoding
from tf_redsync.config import Configurable, serialize
from tf_redsync.exchange.method import Method
from tf_redsync.outer import Outer
from tf_redsync.planning.prediction import Layer, Plan, Total
from tf_redsync.policy import Policy
from tf_redsync.tables import aligned

LAYERS = ("variable", "shape", "bucket", "method", "how", "sent", "dense ms", "ms", "x", "energy")
TOTALS = ("exchange", "sent", "exchange ms", "step ms", "x")
_LEFT = {"variable", "shape", "method", "how", "exchange"}


@dataclasses.dataclass(frozen=True)
class Advice:
    """Recommendation of a plan.

    Attributes:
        compress: Whether to compress.
        text: The recommendation as a sentence.
        code: The line for the training script; `None` if it needs no change.
    """

    compress: bool
    text: str
    code: str | None


def advise(plan: Plan) -> Advice:
    """Return the recommendation: compression if it wins clearly, by the rule of `Auto`."""
    dense, step = plan.step(plan.dense), plan.step(plan.planned)
    computed = f"{_ms(plan.compute)} of it computation"
    if not plan.methods:
        text = f"Stay dense: a step is predicted to take {_ms(dense)}, {computed}."
        if plan.candidates:
            text += " No candidate is clearly faster; pass `--method` to see the layers with one."
        return Advice(False, text, None)
    name = code(_chosen(plan))
    times = f"{_ms(step)} against {_ms(dense)} dense ({_times(dense, step)}), {computed}"
    if not wins(step, dense):
        return Advice(False, f"Stay dense: with {name} a step is predicted to take {times}.", None)
    line = f"optimizer = rs.DistributedOptimizer(optimizer, {name})"
    if _moves_momentum(plan):
        name += ", which applies the optimizer's momentum"
        line += "  # set momentum=0.0 in the optimizer"
    elif any(method.traits.needs_sgd for method in plan.methods):
        line += "  # around SGD with Adam's learning rate and weight decay"
    return Advice(True, f"Use {name}: a step is predicted to take {times}.", line)


def _chosen(plan: Plan) -> Method | Policy | Auto:
    """Return the argument for `DistributedOptimizer`: `Auto`'s only method, else the policy."""
    if isinstance(plan.policy, Policy):
        return plan.policy if plan.policy.rules else plan.policy.default
    method, *others = plan.methods
    alone = all(la.method == method or method.refuses(la.spec) for la in plan.layers)
    if alone and not others:
        return method
    auto = plan.policy  # `Auto.suited` has replaced default candidates, which keeps momentum fixed
    return dataclasses.replace(auto, candidates=None) if auto.left_out or auto.movable else auto


def _moves_momentum(plan: Plan) -> bool:
    """Return whether the advised method applies the momentum that the optimizer has now."""
    auto, method = plan.policy, _chosen(plan)
    if not (isinstance(auto, Auto) and auto.movable and isinstance(method, Method)):
        return False
    return method.traits.momentum_in_exchange > 0.0


def code(value: Any) -> str:
    """Return Python code of a method, policy or schedule, without default arguments."""
    if isinstance(value, tuple):
        return f"({', '.join(code(v) for v in value)}{',' if len(value) == 1 else ''})"
    if not isinstance(value, Configurable):
        return repr(value)
    fields = [(f, getattr(value, f.name)) for f in dataclasses.fields(value)]  # type: ignore[arg-type]
    arguments = [f"{f.name}={code(v)}" for f, v in fields if v != _default(f)]
    return f"{_home(value)}{type(value).__name__}({', '.join(arguments)})"


def _home(value: Configurable) -> str:
    """Return the prefix of the class in a program that imports `tf_redsync as rs`."""
    module = type(value).__module__
    if not module.startswith("tf_redsync."):
        return ""
    home = "rs.contrib." if module.startswith("tf_redsync.contrib.") else "rs."
    if isinstance(value, (IndexCoding, ValueCoding)):
        home += "codings."
    return home + ("outer." if isinstance(value, Outer) else "")


def _default(field: dataclasses.Field[Any]) -> Any:
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


def render(plan: Plan) -> str:
    """Return the tables as text, without the recommendation."""
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
        lines.append(f"These are means over a round: a step with an exchange takes {longest}.")
    dense, planned = (_ms(total.seconds) for total in plan.doubled)
    same = f"{planned} with the same choice, {dense} dense" if plan.methods else dense
    lines.append(f"The exchange of {2 * plan.measured.workers} workers: {same}.")
    return "\n".join(lines)


def notes(args: Any, synthetic: bool) -> str:
    """Return the assumptions of the prediction as text.

    Args:
        args: The flags `workers`, `rate`, `latency` and `step_ms`.
        synthetic: Whether the batch is synthetic.
    """
    lines = [
        f"{args.workers} workers with full-duplex links of {args.rate} and a round-trip time of "
        f"{args.latency:g} ms.",
        "The prediction assumes that collectives reach this rate. TensorFlow's collectives over "
        "gRPC are slower, so the network times are lower bounds.",
    ]
    if synthetic:
        lines.append(
            "The gradient is that of random inputs and targets, so captured energy differs from "
            "real data. Return (model, (inputs, labels), loss) to use your data."
        )
    if args.step_ms is not None:
        lines.append(f"The computation time of a step is set to {args.step_ms:g} ms.")
    return "\n".join(lines)


def as_json(plan: Plan, advice: Advice) -> dict[str, Any]:
    """Return the plan as a structure that can be written as JSON; times are in seconds."""
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


MOST_LAYERS = 60
SPREAD = 30.0  # ratio of times above which their axis is logarithmic
SHOWN = 1e4  # ratio of the times that a logarithmic axis shows


def draw(plan: Plan, path: str) -> None:
    """Write a plot of the layers' times and energies; of a large model, the longest exchanges."""
    from matplotlib.figure import Figure

    longest = sorted(plan.layers, key=lambda la: la.dense.seconds, reverse=True)[:MOST_LAYERS]
    layers = [la for la in plan.layers if la in longest]
    figure = Figure(figsize=(11, 1.8 + 0.3 * len(layers)))
    times, energy = figure.subplots(1, 2, sharey=True, width_ratios=(4, 1))
    _draw_times(times, layers)
    energy.barh(range(len(layers)), [la.energy or 0.0 for la in layers], 0.6, color="C1")
    for row, layer in enumerate(layers):
        energy.text(1.04, row, "-" if layer.energy is None else f"{layer.energy:.2f}", va="center")
    energy.set(xlim=(0, 1), xlabel="captured energy")
    used = ", ".join(type(m).__name__ for m in plan.methods) or "Dense"
    title = (
        f"{plan.measured.workers} workers: step {1e3 * plan.step(plan.dense):,.1f} ms dense, "
        f"{1e3 * plan.step(plan.planned):,.1f} ms with {used}"
    )
    if len(layers) < len(plan.layers):
        title += f"\n{len(layers)} of {len(plan.layers)} variables, those with the longest exchange"
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _draw_times(axes: Any, layers: Sequence[Layer]) -> None:
    rows = range(len(layers))
    dense = [1e3 * la.dense.seconds for la in layers]
    planned = [1e3 * la.share.seconds for la in layers]
    axes.barh([r - 0.2 for r in rows], dense, 0.4, label="dense", color="0.7")
    axes.barh([r + 0.2 for r in rows], planned, 0.4, label="planned", color="C0")
    seen = [t for t in (*dense, *planned) if t > 0]
    if seen and max(seen) > SPREAD * min(seen):
        axes.set_xscale("log")
        axes.set_xlim(max(seen) / SHOWN, 1.3 * max(seen))
        axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(rows, [f"{la.spec.name}  {type(la.method).__name__}" for la in layers])
    axes.set_ylim(len(layers) - 0.3, -0.7)
    axes.set_xlabel("predicted exchange, ms per step")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncol=2, frameon=False, borderaxespad=0)
