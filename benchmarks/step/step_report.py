"""Summaries, tables and plots of `benchmarks/step/step_time.py`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

COLUMNS = (
    "median ms",
    "min ms",
    "cpu ms",
    "x none",
    "dense / x",
    "counted MB",
    "wire MB",
    "start s",
)


def step_times(result: dict[str, Any]) -> list[float]:
    """Returns one round's times; means over a period if only one step of it exchanges all."""
    times, period = result["times_ms"], result.get("period", 1)
    return [statistics.mean(times[i : i + period]) for i in range(0, len(times), period)]


def summary(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Pools the rounds of one method."""
    times = [ms for result in rounds for ms in step_times(result)]
    wire = [result["wire_bytes_per_step"] for result in rounds]
    return {
        "step_ms": statistics.median(times),
        "step_ms_mean": statistics.mean(times),
        "step_ms_min": min(times),
        "bytes_per_step": rounds[-1]["bytes_per_step"],
        "wire_bytes_per_step": None if None in wire else statistics.mean(wire),
        "cpu_ms_per_step": statistics.median(result["cpu_ms_per_step"] for result in rounds),
        "round_step_ms": [statistics.median(step_times(result)) for result in rounds],
        "start_s": _start(rounds),
        "period": rounds[-1].get("period", 1),
    }


def _start(rounds: Sequence[dict[str, Any]]) -> dict[str, float] | None:
    """Returns the median seconds of each part of the start; `None` if the worker has no clock."""
    starts = [result["start_s"] for result in rounds if "start_s" in result]
    parts = starts[0] if starts else {}
    return {part: statistics.median(start[part] for start in starts) for part in parts} or None


def heading(report: dict[str, Any]) -> str:
    """Returns the line above a table."""
    params = f"{report['params']:,}" if report["params"] else "?"
    return (
        f"{report['model']}, {params} parameters, {report['workers']} workers, "
        f"batch {report['batch'] or '?'} each, rate {report['rate']}"
        + (f", latency {report['latency_ms']:g} ms" if report.get("latency_ms") else "")
    )


def table(methods: dict[str, dict[str, Any]]) -> str:
    """Returns the lines to print: one method per line, times in ms, traffic in MB (10^6 bytes)."""
    none = methods.get("none", {}).get("step_ms")
    dense = methods.get("dense", {}).get("step_ms")
    width = max(10, *(len(name) + 1 for name in methods))
    lines = [f"{'method':<{width}}" + "".join(f"{title:>12}" for title in COLUMNS)]
    for name, row in methods.items():
        if "error" in row:
            lines.append(f"{name:<{width}}  failed: {row['error']}")
            continue
        step, wire, start = row["step_ms"], row["wire_bytes_per_step"], row.get("start_s")
        cells = [
            f"{step:.1f}",
            f"{row['step_ms_min']:.1f}",
            f"{row['cpu_ms_per_step']:.1f}",
            f"{step / none:.2f}" if none else "-",
            f"{dense / step:.2f}" if dense else "-",
            f"{row['bytes_per_step'] / 1e6:.3f}",
            "-" if wire is None else f"{wire / 1e6:.3f}",
            f"{start['build'] + start['first_step']:.1f}" if start else "-",
        ]
        lines.append(f"{name:<{width}}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def plot(reports: Sequence[dict[str, Any]], path: str) -> None:
    """Plots step times as bars in units of `none`: a row per model and workers, a column per rate.

    Reports without a time of `none` have no unit; their panels show a note.
    """
    from matplotlib.figure import Figure

    rows = list(dict.fromkeys((r["model"], r["workers"]) for r in reports))
    rates = list(dict.fromkeys(r["rate"] for r in reports))
    names = list(dict.fromkeys(name for r in reports for name in r["methods"]))[::-1]
    size = (1.2 + 4.2 * len(rates), len(rows) * (1.2 + 0.24 * len(names)))
    figure = Figure(figsize=size)
    panels = figure.subplots(len(rows), len(rates), squeeze=False, sharey=True, sharex="row")
    for axes in panels.flat:
        axes.set_axis_off()
    for report in reports:
        axes = panels[rows.index((report["model"], report["workers"]))][rates.index(report["rate"])]
        axes.set_axis_on()
        _bars(axes, report, names)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _bars(axes: Any, report: dict[str, Any], names: list[str]) -> None:
    rate = "loopback" if report["rate"] == "none" else f"{report['rate']}/s"
    title = f"{report['model']}, {report['workers']} workers, {rate}"
    axes.set_title(title, fontsize=9)
    unit = report["methods"].get("none", {}).get("step_ms")
    if not unit:
        axes.text(0.5, 0.5, "no time of `none`", ha="center", transform=axes.transAxes)
        return
    colors = {"none": "0.6", "barrier": "0.6", "dense": "C3", "rs_dense": "C1", "Dense()": "C3"}
    for i, name in enumerate(names):
        row = report["methods"].get(name)
        if row is None:
            continue
        if "error" in row:
            axes.text(0.55, i, "failed", va="center", fontsize=7, color="C3")
            continue
        ratio = row["step_ms"] / unit
        axes.barh(i, ratio, color=colors.get(name, "C0"))
        axes.annotate(
            f"{ratio:.2f}", (ratio, i), (3, 0), textcoords="offset points", va="center", fontsize=7
        )
    axes.set_xscale("log")  # on a slow network dense takes a hundred times as long as the rest
    largest = max(row.get("step_ms", 0) for row in report["methods"].values()) / unit
    axes.set_xlim(0.5, max(axes.get_xlim()[1], 2.5 * largest))  # shared by the panels of a row
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_ylim(-0.7, len(names) - 0.3)
    axes.axvline(1, color="0.3", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(names)), names, fontsize=8)
    label = f"step time / none ({unit:.0f} ms)"
    if any(row.get("step_ms", unit) < unit for row in report["methods"].values()):
        # A step without an exchange is the shortest possible.
        label += ", below 1: noise"
    axes.set_xlabel(label, fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
