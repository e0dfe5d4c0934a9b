"""Results of `tf-redsync bench`: table, recommendation, plot and JSON file."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tf_redsync import expressions, tables
from tf_redsync.auto import wins
from tf_redsync.methods.dense import Dense, NoExchange
from tf_redsync.methods.known_losses import is_lossless


@dataclasses.dataclass(kw_only=True)
class Measured:
    """Measured steps of one method.

    Attributes:
        method: The method's expression, as given.
        loss: The method's measured loss of accuracy, from `known_loss`.
        seconds: Mean seconds per step, one entry for each round.
        bytes: Bytes that a worker sends per step.
    """

    method: str
    loss: str
    seconds: list[float] = dataclasses.field(default_factory=list)
    bytes: float = 0.0

    @property
    def is_dense(self) -> bool:
        """Whether the method is `Dense`, the baseline, in any spelling."""
        return self._value() == Dense()

    @property
    def is_none(self) -> bool:
        """Whether the method is `NoExchange`, in any spelling."""
        return self._value() == NoExchange()

    def _value(self) -> Any:
        return expressions.evaluate(expressions.called(self.method)).method

    @property
    def milliseconds(self) -> float:
        """Median over the rounds of the milliseconds per step."""
        return 1e3 * statistics.median(self.seconds)

    def hours(self, steps: int) -> float:
        """Return the hours that `steps` steps take."""
        return steps * self.milliseconds / 3.6e6


def table(rows: Sequence[Measured], steps: int) -> str:
    """Return the results as a text table, with speed-ups over `Dense` if it was measured."""
    dense = _dense(rows)
    head = ["method", "ms per step", "fastest", "slowest", "bytes sent per step"]
    cells = [[*head, f"hours for {steps:,} steps", "known loss of accuracy"]]
    for row in rows:
        low, high = 1e3 * min(row.seconds), 1e3 * max(row.seconds)
        times = [f"{ms:.1f}" for ms in (row.milliseconds, low, high)]
        loss = "" if row.is_none else row.loss
        hours = f"{row.hours(steps):.2f}"
        cells.append([row.method, *times, f"{row.bytes:,.0f}", hours, loss])
    if dense is not None:
        ratios = [f"{dense.milliseconds / row.milliseconds:.2f}x" for row in rows]
        speeds = ["speed", *ratios]
        cells = [[*c[:5], more, *c[5:]] for c, more in zip(cells, speeds, strict=True)]
    return "\n".join(tables.aligned(cells, right=range(1, len(cells[0]) - 1)))


def sentence(rows: Sequence[Measured], steps: int) -> str:
    """Return the recommendation, with hours and the known loss; empty without `Dense`."""
    dense = _dense(rows)
    others = [row for row in rows if not row.is_dense and not row.is_none]
    if dense is None or not others:
        return ""
    best = min(others, key=lambda row: row.milliseconds)
    if not wins(best.milliseconds / 1e3, dense.milliseconds / 1e3):
        return f"Stay dense: {_times(dense, steps)}; the fastest method, {_describe(best, steps)}."
    advice = f"Use {_describe(best, steps)} (dense: {_times(dense, steps)})."
    if is_lossless(best.loss):
        return f"{advice} It has cost no accuracy beyond noise."
    advice += f" Its known loss of accuracy: {best.loss}; see docs/accuracy.md."
    lossless = [row for row in others if is_lossless(row.loss)]
    safe = min(lossless, key=lambda row: row.milliseconds, default=None)
    if safe is None or not wins(safe.milliseconds / 1e3, dense.milliseconds / 1e3):
        return advice
    return f"{advice} Without a loss: {_describe(safe, steps)}."


def figure(rows: Sequence[Measured], steps: int) -> Any:
    """Return a plotly figure: a bar of hours for each method, with its known loss of accuracy."""
    import plotly.graph_objects as go

    shown = list(reversed(rows))
    texts = [f"{row.milliseconds:.1f} ms a step" for row in shown]
    losses = ["" if row.is_dense or row.is_none else f"loss: {row.loss}" for row in shown]
    bars = go.Bar(
        x=[row.hours(steps) for row in shown],
        y=[row.method for row in shown],
        text=[f" {text}<br> {loss}" for text, loss in zip(texts, losses, strict=True)],
        marker_color=["#888" if row.is_none else "#4c78a8" for row in shown],
        orientation="h",
        textposition="outside",
    )
    return go.Figure(bars).update_layout(
        template="plotly_white",
        title=sentence(rows, steps).replace(". ", ".<br>"),
        title_font_size=14,
        xaxis={
            "title": f"hours for {steps:,} steps",
            "range": [0, 1.4 * max(row.hours(steps) for row in rows)],  # room for the texts
        },
        margin={"t": 110},
        height=200 + 60 * len(rows),
    )


def show(rows: Sequence[Measured], steps: int, plot: str | None, path: str | None) -> None:
    """Print the table and the recommendation, and write the requested files.

    Args:
        rows: The results.
        steps: Number of steps of the whole training, for the hours.
        plot: HTML file for the plot; `None` for none.
        path: JSON file for the results; `None` for none.
    """
    print(f"\n{table(rows, steps)}\n\n{sentence(rows, steps)}", flush=True)
    if path:
        records = [{"method": r.method, "seconds": r.seconds, "bytes": r.bytes} for r in rows]
        Path(path).write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    if plot:
        figure(rows, steps).write_html(plot, include_plotlyjs=True)
        print(f"Picture: {plot}", flush=True)


def _dense(rows: Sequence[Measured]) -> Measured | None:
    return next((row for row in rows if row.is_dense), None)


def _describe(row: Measured, steps: int) -> str:
    return f"{row.method}, {_times(row, steps)}"


def _times(row: Measured, steps: int) -> str:
    return f"{row.milliseconds:.1f} ms a step, {row.hours(steps):.1f} h for {steps:,}"
