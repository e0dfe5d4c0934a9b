"""A plan as a picture: predicted time of every layer's exchange, and its captured energy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tf_redsync.planning.prediction import Layer, Plan

MOST_LAYERS = 60
SPREAD = 30.0  # ratio of times from which their axis is logarithmic
SHOWN = 1e4  # what takes a smaller part of the longest time than the inverse has no bar then


def draw(plan: Plan, path: str) -> None:
    """Write the picture; of the layers of a large model, those with the longest dense exchange."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    longest = sorted(plan.layers, key=lambda la: la.dense.seconds, reverse=True)[:MOST_LAYERS]
    layers = [la for la in plan.layers if la in longest]
    figure, (times, energy) = plt.subplots(
        1, 2, figsize=(11, 1.8 + 0.3 * len(layers)), sharey=True, width_ratios=(4, 1)
    )
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
    plt.close(figure)


def _draw_times(axes: Any, layers: Sequence[Layer]) -> None:
    rows = range(len(layers))
    dense = [1e3 * la.dense.seconds for la in layers]
    own = [1e3 * la.share.seconds for la in layers]
    axes.barh([r - 0.2 for r in rows], dense, 0.4, label="dense", color="0.7")
    axes.barh([r + 0.2 for r in rows], own, 0.4, label="planned", color="C0")
    seen = [t for t in (*dense, *own) if t > 0]
    if seen and max(seen) > SPREAD * min(seen):
        axes.set_xscale("log")
        axes.set_xlim(max(seen) / SHOWN, 1.3 * max(seen))
        axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(rows, [f"{la.spec.name}  {type(la.method).__name__}" for la in layers])
    axes.set_ylim(len(layers) - 0.3, -0.7)
    axes.set_xlabel("predicted exchange, ms a step")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncol=2, frameon=False, borderaxespad=0)
