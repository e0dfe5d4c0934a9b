"""The pictures of a report that are by layer: density, staleness, residuals. Needs plotly."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from tf_redsync.metrics.history import Worker, column
from tf_redsync.metrics.pictures import empty

_LINES = 10  # layers that get a line each
_SHOWN = 40  # layers in a bar chart; of more, the largest


TEXT = (
    "Of this worker. <b>Density</b>: share of a variable's elements that was sent, mean of all "
    "samples; 1 is dense. <b>Staleness</b>: after how many steps an element is sent, on average, "
    "which is 1 / density; of methods whose messages do not say how many elements they hold both "
    "follow from the method's settings. <b>Residual</b>: the norm of what waits; it "
    "grows at first, then stays where as much is delivered as comes in. Hover for the names."
)


def layers(worker: Worker) -> list[Any]:
    """Draw density, staleness and residuals, as far as they are known."""
    variables = worker.run.get("variables", ())
    samples = [s for s in worker.samples if _fits(s, len(variables))]
    if not samples or not variables:
        return []
    largest = sorted(range(len(variables)), key=lambda i: -variables[i]["elements"])
    figures = [_density(variables, samples, sorted(largest[:_SHOWN]))]
    if len(variables) > _SHOWN:
        figures[0].update_xaxes(
            title_text=f"the {_SHOWN} largest of {len(variables)} variables", col=1
        )
        figures[0].update_layout(margin_b=60)
    if any(r is not None for s in samples for r in s["layers"]["residual"]):
        figures += _residuals(variables, samples, largest)
    return figures


def _fits(sample: dict[str, Any], number: int) -> bool:
    layers = sample.get("layers") or {}
    return all(len(layers.get(name) or ()) == number for name in ("density", "residual"))


def _density(
    variables: Sequence[dict[str, Any]], samples: Sequence[dict[str, Any]], shown: Sequence[int]
) -> Any:
    import plotly.graph_objects as go

    density = []
    for i in shown:
        seen = [s["layers"]["density"][i] for s in samples if s["layers"]["density"][i] is not None]
        density.append(sum(seen) / len(seen) if seen else None)
    titles = ("density", "staleness: steps until an element is sent")
    figure = empty(
        120 + 22 * len(shown), columns=2, shared_yaxes=True, horizontal_spacing=0.04,
        subplot_titles=titles,
    )  # fmt: skip
    names = [short_name(variables[i]["name"]) for i in shown]
    tips = [
        f"{html.escape(variables[i]['name'])} {variables[i]['shape']}<br>{variables[i]['method']}, "
        f"{html.escape(variables[i]['how'])}"
        for i in shown
    ]
    stale = [1.0 / d if d else None for d in density]
    for number, (xs, color) in enumerate(((density, "#4c78a8"), (stale, "#f58518")), start=1):
        bar = go.Bar(
            x=xs, y=list(range(len(shown))), orientation="h", marker_color=color, showlegend=False,
            hovertext=tips, texttemplate="%{x:.3~g}", textposition="auto", cliponaxis=False,
        )  # fmt: skip
        figure.add_trace(bar, row=1, col=number)
        positive = [x for x in xs if x]
        if positive and max(positive) > 20 * min(positive):
            low, high = math.log10(min(positive)), math.log10(max(positive))
            span = [low - 0.5, high + 0.1] if number == 1 else [min(low, 0.0) - 0.3, high + 0.1]
            figure.update_xaxes(type="log", range=span, dtick=1, row=1, col=number)
    figure.update_yaxes(
        tickvals=list(range(len(shown))), ticktext=names, autorange="reversed", tickfont_size=11
    )
    return figure.update_layout(margin={"l": 190, "t": 40})


def _residuals(
    variables: Sequence[dict[str, Any]],
    samples: Sequence[dict[str, Any]],
    largest: Sequence[int],
) -> list[Any]:
    import plotly.graph_objects as go

    steps = column(samples, "step")
    norms = {
        i: [s["layers"]["residual"][i] for s in samples]
        for i in largest
        if any(s["layers"]["residual"][i] is not None for s in samples)
    }
    figure = empty(380)
    total = column(samples, "residual_norm")
    figure.add_trace(
        go.Scatter(x=steps, y=total, name="all", line={"color": "black", "dash": "dot"})
    )
    for i in list(norms)[:_LINES]:
        name = short_name(variables[i]["name"])
        figure.add_trace(go.Scatter(x=steps, y=norms[i], name=name))
    figure.update_yaxes(title_text="norm of the residual", rangemode="tozero")
    figure.update_xaxes(title_text="step")
    figure.update_layout(legend={"orientation": "v", "x": 1.02, "y": 1, "yanchor": "top"})
    if len(norms) <= _LINES:
        return [figure]
    figure.update_layout(title={"text": f"the {_LINES} largest variables", "font_size": 13})
    return [figure, _heat(variables, steps, {i: norms[i] for i in sorted(norms)})]


def _heat(
    variables: Sequence[dict[str, Any]], steps: Sequence[int], norms: dict[int, list[float | None]]
) -> Any:
    import plotly.graph_objects as go

    values = [[math.log10(v) if v else None for v in row] for row in norms.values()]
    names = [short_name(variables[i]["name"]) for i in norms]
    rows = list(range(len(names)))
    figure = empty(140 + 12 * len(names))
    figure.add_trace(
        go.Heatmap(
            x=list(steps), y=rows, z=values, colorscale="Viridis", colorbar_title="log10 norm",
            hovertext=[[n] * len(steps) for n in names],
        )
    )  # fmt: skip
    figure.update_yaxes(tickvals=rows, ticktext=names, autorange="reversed", tickfont_size=9)
    figure.update_xaxes(title_text="step")
    return figure.update_layout(margin={"l": 190}, title={"text": "all residuals", "font_size": 13})


def short_name(name: str, at_most: int = 26) -> str:
    """Return the end of a variable's path: what tells it from the others."""
    parts = name.split("/")
    while len(parts) > 2 and len("/".join(parts)) > at_most:
        parts = parts[1:]
    found = "/".join(parts)
    return found if len(found) <= at_most else "…" + found[1 - at_most :]
