"""The plots of `benchmarks/scale/scale.py`: step times over workers, and the fastest method."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from benchmarks.scale import prediction
from benchmarks.scale.scale_methods import DENSE, NAMES, NONE
from benchmarks.scale.traffic import bytes_per_second

# Okabe and Ito's colors, which color-blind readers can distinguish.
COLOURS = dict(
    zip(
        NAMES,
        (
            "#999999",
            "#000000",
            "#56b4e9",
            "#d55e00",
            "#e69f00",
            "#009e73",
            "#cc79a7",
            "#0072b2",
        ),
        strict=True,
    )
)
MARKERS = dict(zip(NAMES, "xsP^vDho", strict=True))
RATES = tuple(10 ** (8 + i / 16) for i in range(49))  # bits per second: 100 Mbit/s to 100 Gbit/s
MAP_WORKERS = tuple(round(2 ** (1 + i / 4)) for i in range(45))  # 2 to 4,096
CROSSED = "RedSync"  # the method whose crossovers are marked
CLEARLY = 0.9  # methods that take more than this part of dense's time are not worth it


def steps(report: Mapping[str, Any], path: str) -> None:
    """Plots measured and predicted step times: the check, and separate machines.

    Args:
        report: With `check` and `predicted`.
        path: Path of the plot.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 4.8))
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.9))
    for row in report["check"]:
        style = {"color": COLOURS[row["method"]], "marker": MARKERS[row["method"]]}
        left.plot(row["workers"], row["measured_s"], linestyle="", markersize=6, **style)
    for name in {row["method"]: None for row in report["check"]}:
        rows = [row for row in report["check"] if row["method"] == name]
        left.plot(
            [row["workers"] for row in rows],
            [row["predicted_s"] for row in rows],
            color=COLOURS[name],
            linewidth=1,
        )
    checked = sorted({row["workers"] for row in report["check"]})
    left.set_title(
        f"check: {report['rate']}, all workers on {report['cores']} cores\n"
        "markers measured, lines predicted"
    )
    left.set_xlim(checked[0] / 1.2, 1.2 * checked[-1])

    predicted = report["predicted"]
    workers = predicted["workers"]
    longest_first = sorted(predicted["step_s"].items(), key=lambda item: -item[1][-1])
    for name, seconds in longest_first:  # the legend in the order of the lines' ends
        style = {"color": COLOURS[name], "marker": MARKERS[name], "markersize": 4}
        right.plot(workers, seconds, label=name, **style)
    right.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8)
    _mark_crossovers(right, predicted)
    right.set_title(
        f"predicted: {predicted['rate']}, {predicted['latency_us']:g} us, "
        "a machine for each worker\n"
        f"circles: from so many workers on faster than {CROSSED}"
    )
    for axes, ticks in ((left, checked), (right, workers)):
        axes.set_yscale("log")
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks], fontsize=8)
        axes.set_xlabel("workers")
        axes.grid(True, which="major", alpha=0.3)
    left.set_ylabel("seconds of a step")
    figure.suptitle(f"{report['model']}, {report['params']:,} parameters", fontsize=11, y=1.04)
    figure.savefig(path, dpi=110, bbox_inches="tight")


def _mark_crossovers(axes: Any, predicted: Mapping[str, Any]) -> None:
    """Marks each crossover with its number of workers."""
    import numpy as np

    found = [row for row in predicted["crossovers"] if row["workers"] and row["from"] == CROSSED]
    for i, row in enumerate(sorted(found, key=lambda row: row["workers"])):
        seconds = predicted["step_s"][row["to"]]
        height = np.exp(
            np.interp(np.log(row["workers"]), np.log(predicted["workers"]), np.log(seconds))
        )
        axes.plot(
            row["workers"],
            height,
            "o",
            markersize=9,
            markerfacecolor="none",
            color=COLOURS[row["to"]],
        )
        axes.annotate(
            f"{row['workers']}",
            (row["workers"], height),
            xytext=(0, (-14, 8)[i % 2]),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=COLOURS[row["to"]],
        )


def fastest(model: prediction.Model, cluster: prediction.Cluster) -> list[list[str]]:
    """Returns the best method for each of `MAP_WORKERS` at each of `RATES`.

    That is dense if no method takes less than `CLEARLY` of its time.

    Args:
        model: The measurements.
        cluster: Latency and speed.
    """
    names = [name for name in model.methods if name not in (NONE, DENSE)]
    rows = []
    for workers in MAP_WORKERS:
        row = []
        for bits in RATES:
            there = dataclasses.replace(cluster, workers=workers, rate=bytes_per_second(bits))
            seconds = {name: model.step_seconds(name, there) for name in names}
            best = min(seconds, key=seconds.__getitem__)
            worth = seconds[best] < CLEARLY * model.step_seconds(DENSE, there)
            row.append(best if worth else DENSE)
        rows.append(row)
    return rows


def winners(report: Mapping[str, Any], cluster: prediction.Cluster, path: str) -> None:
    """Plots the fastest method over the links' rate and the number of workers.

    Args:
        report: The measurements.
        cluster: Latency and speed.
        path: Path of the plot.
    """
    import numpy as np
    from matplotlib import colors, patches
    from matplotlib.figure import Figure

    model = prediction.model_of(report)
    table = fastest(model, cluster)
    found = [name for name in NAMES if any(name in row for row in table)]
    numbers = [[found.index(name) for name in row] for row in table]
    figure = Figure(figsize=(7.2, 4.8))
    axes = figure.subplots()
    axes.pcolormesh(
        np.array(RATES) / 1e9,
        MAP_WORKERS,
        np.array(numbers),
        cmap=colors.ListedColormap([COLOURS[name] for name in found]),
        vmin=-0.5,
        vmax=len(found) - 0.5,
        shading="nearest",
        alpha=0.8,
    )
    ratio = [
        [
            model.step_seconds(DENSE, at) / model.step_seconds(name, at)
            for name, at in zip(
                row,
                (
                    dataclasses.replace(cluster, workers=p, rate=bytes_per_second(bits))
                    for bits in RATES
                ),
                strict=True,
            )
        ]
        for p, row in zip(MAP_WORKERS, table, strict=True)
    ]
    lines = axes.contour(
        np.array(RATES) / 1e9,
        MAP_WORKERS,
        np.array(ratio),
        levels=[1.5, 2, 4, 8, 16],
        colors="white",
        linewidths=1,
    )
    _label(axes, lines)
    axes.set_xscale("log")
    axes.set_yscale("log", base=2)
    ticks = [2**i for i in range(1, 13)]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.set_xticks([0.1, 1, 10, 100], ["100 Mbit/s", "1 Gbit/s", "10 Gbit/s", "100 Gbit/s"])
    axes.set_xlabel("rate of a link")
    axes.set_ylabel("workers")
    axes.set_title(
        f"fastest method, {report['model']}; lines: times faster than Dense\n"
        f"density {report['density']:g}, latency {1e6 * cluster.latency:g} us, "
        f"speed {cluster.speed:g}",
        fontsize=10,
    )
    handles = [patches.Patch(color=COLOURS[name], alpha=0.8, label=name) for name in found]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=8)
    figure.savefig(path, dpi=110, bbox_inches="tight")


def _label(axes: Any, lines: Any) -> None:
    """Labels every segment of every line; `clabel` omits short ones."""
    from matplotlib import patheffects

    for level, pieces in zip(lines.levels, lines.allsegs, strict=True):
        for piece in pieces:
            if len(piece) < 2:
                continue
            text = axes.text(
                *piece[len(piece) // 2],
                f"{level:g}x",
                color="white",
                fontsize=8,
                ha="center",
                va="center",
            )
            text.set_path_effects([patheffects.withStroke(linewidth=2, foreground="0.3")])
