"""A plan as a picture: predicted time of every layer's exchange, and its captured energy."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tf_redsync.planning.prediction import Plan

MOST_LAYERS = 60
SPREAD = 30.0  # ratio of times from which their axis is logarithmic


def check(path: str) -> None:
    """Check, before anything is measured, that a picture can be written.

    Raises:
        ValueError: without matplotlib, for another kind of file, and for a missing directory.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "`--plot` needs matplotlib, which is not installed: pip install matplotlib, or leave "
            f"--plot out. Received: --plot={path}"
        )
    if Path(path).suffix != ".png" or not Path(path).absolute().parent.is_dir():
        raise ValueError(
            "`--plot` must be a file that ends in .png in a directory that exists. "
            f"Received: --plot={path}"
        )


def draw(plan: Plan, path: str) -> None:
    """Write the picture; of the layers of a large model, those with the longest dense exchange."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    longest = sorted(plan.layers, key=lambda la: la.dense.seconds, reverse=True)[:MOST_LAYERS]
    layers = [la for la in plan.layers if la in longest]
    rows = range(len(layers))
    figure, (times, energy) = plt.subplots(
        1, 2, figsize=(11, 1.8 + 0.3 * len(layers)), sharey=True, width_ratios=(4, 1)
    )
    dense = [1e3 * la.dense.seconds for la in layers]
    own = [1e3 * la.share.seconds for la in layers]
    times.barh([r - 0.2 for r in rows], dense, 0.4, label="dense", color="0.7")
    times.barh([r + 0.2 for r in rows], own, 0.4, label="planned", color="C0")
    seen = [t for t in (*dense, *own) if t > 0]
    if seen and max(seen) > SPREAD * min(seen):
        times.set_xscale("log")
        times.xaxis.set_major_formatter("{x:g}")
    times.set_yticks(rows, [f"{la.spec.name}  {type(la.method).__name__}" for la in layers])
    times.invert_yaxis()
    times.set_xlabel("predicted exchange, ms a step")
    times.grid(axis="x", alpha=0.3)
    energy.barh(rows, [la.energy or 0.0 for la in layers], 0.6, color="C1")
    for row, layer in zip(rows, layers, strict=True):
        energy.text(1.04, row, "-" if layer.energy is None else f"{layer.energy:.2f}", va="center")
    energy.set(xlim=(0, 1), xlabel="captured energy")
    totals = plan.step(plan.dense), plan.step(plan.planned)
    title = (
        f"{plan.measured.workers} workers: step {1e3 * totals[0]:,.1f} ms dense, "
        f"{1e3 * totals[1]:,.1f} ms with {plan.planned.name}"
    )
    if len(layers) < len(plan.layers):
        title += f"\n{len(layers)} of {len(plan.layers)} variables, the slowest ones"
    figure.suptitle(title)
    figure.legend(*times.get_legend_handles_labels(), loc="lower left", ncol=2, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
