"""Figures of the report: loss, bytes, times, and density and residuals by layer. Needs plotly."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from typing import Any

from tf_redsync.metrics.records import History, Worker, column

PARTS = {  # colors of a step's parts, in the order of stacking
    "compute": "#4c78a8",
    "select": "#f58518",
    "decode": "#54a24b",
    "input": "#b279a2",
    "wait": "#e45756",
}


def empty(height: int, rows: int = 1, columns: int = 1, **options: Any) -> Any:
    """Return a figure without traces, with subplots in rows and columns."""
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=rows, cols=columns, **options)
    return figure.update_layout(
        template="plotly_white",
        height=height,
        margin={"l": 70, "r": 20, "t": 40, "b": 50},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        font={"size": 12},
    )


def losses(worker: Worker) -> list[float | None]:
    """Return the loss of each sample; `None` if Keras has not logged it."""
    return [(sample.get("logs") or {}).get("loss") for sample in worker.samples]


def loss_text(worker: Worker) -> str:
    """Return the caption of the loss."""
    text = (
        "The loss as Keras logs it: the mean over the current epoch, which restarts with each "
        "epoch. Bytes are those that this worker has sent. "
    )
    if any("val_loss" in (e.get("logs") or {}) for e in worker.epochs):
        text += "Points show the validation loss at the end of an epoch."
    if not any(loss is not None for loss in losses(worker)):
        text = "The logs of <code>fit</code> had no <code>loss</code>."
    return text


def loss(worker: Worker) -> Any:
    """Return a figure of the loss against steps, time and bytes."""
    import plotly.graph_objects as go

    figure = empty(
        340, columns=3, shared_yaxes=True, horizontal_spacing=0.03,
    )  # fmt: skip
    samples, loss_values = worker.samples, losses(worker)
    sent = [_scaled(s.get("bytes_sent"), 1e-6) for s in samples]
    known = {s["step"]: i for i, s in enumerate(samples)}
    validated = [e for e in worker.epochs if (e.get("logs") or {}).get("val_loss") is not None]
    axes = (("step", column(samples, "step")), ("seconds", column(samples, "elapsed")))
    for number, (name, xs) in enumerate((*axes, ("MB sent", sent)), start=1):
        named, place = {"showlegend": number == 1}, {"row": 1, "col": number}
        line = go.Scatter(x=xs, y=loss_values, name="loss", line_color="#4c78a8", **named)
        figure.add_trace(line, **place)
        if validated:
            at = [_at(e, number, known, sent) for e in validated]
            ys = [e["logs"]["val_loss"] for e in validated]
            points = go.Scatter(
                x=at, y=ys, name="val_loss", mode="markers", marker_color="#e45756", **named
            )
            figure.add_trace(points, **place)
        figure.update_xaxes(title_text=name, **place)
    return figure.update_yaxes(title_text="loss", col=1)


def _at(
    epoch: dict[str, Any], axis: int, known: dict[int, int], sent: Sequence[float | None]
) -> float | None:
    """Return the position of an epoch's end on an axis of the losses."""
    if axis < 3:
        position: float | None = epoch.get("step" if axis == 1 else "elapsed")
        return position
    bytes_sent = (epoch.get("logs") or {}).get("bytes_sent")
    if bytes_sent is not None:
        return _scaled(bytes_sent, 1e-6)
    return sent[known[epoch["step"]]] if epoch.get("step") in known else None


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


BYTES = (
    "Bytes that this worker sends, as the library counts them: payloads of ring collectives, "
    "without the headers of TCP and gRPC. Each point is the mean of the steps since the previous "
    "point."
)


def sent(worker: Worker) -> Any:
    """Return a figure of the bytes per step and the compression ratio."""
    import plotly.graph_objects as go

    figure = empty(
        300,
        columns=2,
        subplot_titles=("bytes per step", "compression ratio"),
        horizontal_spacing=0.1,
    )
    steps, dense = column(worker.samples, "step"), worker.run.get("dense_bytes")
    sent = column(worker.samples, "bytes_per_step")
    style = {"showlegend": False, "mode": "lines+markers", "marker_size": 4}
    figure.add_trace(go.Scatter(x=steps, y=sent, line_color="#4c78a8", **style), row=1, col=1)
    if dense:
        figure.add_hline(
            dense, line_dash="dot", line_color="#888", annotation_text="dense",
            annotation_position="bottom right", row=1, col=1,
        )  # fmt: skip
        if all(sent) and max(sent, default=dense) * 5 < dense:
            figure.update_yaxes(type="log", dtick="D2", row=1, col=1)
    ratio = column(worker.samples, "compression_ratio")
    figure.add_trace(go.Scatter(x=steps, y=ratio, line_color="#54a24b", **style), row=1, col=2)
    figure.update_yaxes(rangemode="tozero", row=1, col=2)
    figure.update_layout(margin_t=50)
    return figure.update_xaxes(title_text="step")


_CURVES = 8  # workers whose step times are shown
_BARS = 6  # profiles


TIME = (
    "Left: the mean time of a step, from the start of <code>train_step</code> to its end, for the "
    f"first {_CURVES} workers. Right: its parts on worker 0, from the last {_BARS} profiles of a "
    "few steps. The stacked parts add up to the step: "
    "<b>compute</b> is the model and the optimizer, <b>select</b> makes messages, <b>decode</b> "
    "adds up received messages, <b>input</b> waits for the batch, and during <b>wait</b> none of "
    "these runs: the step waits for the network, slower workers or TensorFlow itself. The black "
    "line, <b>exchange</b>, is the time in which collectives run, which may overlap with the other "
    "parts. One worker cannot tell the network's time in it from the delay of other workers."
)


def time(history: History) -> list[Any]:
    """Return a figure of the time per step and its parts."""
    import plotly.graph_objects as go

    split = next((w for w in history.workers if w.splits), None)
    columns = 2 if split else 1
    figure = empty(360, columns=columns, horizontal_spacing=0.1)
    for worker in history.workers[:_CURVES]:
        steps, times = column(worker.samples, "step"), column(worker.samples, "step_ms")
        figure.add_trace(
            go.Scatter(x=steps, y=times, name=f"worker {worker.rank}", legend="legend"),
            row=1, col=1,
        )  # fmt: skip
    figure.update_yaxes(title_text="ms per step", rangemode="tozero")
    figure.update_xaxes(title_text="step", row=1, col=1)
    if split is None:
        why = history.first.no_split or "no profile had ended when this report was written"
        figure.add_annotation(
            text=f"no profile: {_wrapped(why)}", xref="paper", yref="paper", x=0.5, y=0.95,
            showarrow=False,
        )  # fmt: skip
        return [figure]
    shown = split.splits[-_BARS:]
    names = [f"step {record['step']:,}" for record in shown]
    for part, color in PARTS.items():
        values = [record.get(f"{part}_ms") for record in shown]
        bar = go.Bar(x=names, y=values, name=part, marker_color=color, legend="legend2")
        figure.add_trace(bar, row=1, col=2)
    exchange = go.Scatter(
        x=names, y=[record.get("exchange_ms") for record in shown], name="exchange",
        mode="markers", legend="legend2",
        marker={"symbol": "line-ew", "size": 40, "line": {"width": 3, "color": "black"}},
    )  # fmt: skip
    figure.add_trace(exchange, row=1, col=2)
    figure.update_layout(
        barmode="stack",
        legend={"x": 0, "xanchor": "left"},
        legend2={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0.55},
    )
    return [figure]


def _wrapped(text: str) -> str:
    return re.sub(r"(.{1,70})(?:\s+|$)", r"\1<br>", html.escape(text)).removesuffix("<br>")


_LINES = 10  # layers with a line of their own
_SHOWN = 40  # layers in a bar chart, the largest ones
_POINTS = 1_000  # samples in a figure with values of every layer, at most


LAYERS = (
    "Values of this worker. <b>Density</b>: share of a variable's elements that was sent, mean of "
    "all samples; 1 is dense. <b>Staleness</b>: mean number of steps until an element is sent, "
    "1 / density. If a method's messages do not count their elements, both follow from its "
    "settings. <b>Residual</b>: norm of the residual, which grows until as much is delivered as "
    "is added in a step. Hover for the names."
)


def layers(worker: Worker) -> list[Any]:
    """Return figures of density, staleness and residuals, as far as they are known."""
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
        stride = -(-len(samples) // _POINTS)
        figures += _residuals(variables, samples[::-stride][::-1], largest)
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
    titles = ("density", "staleness (steps until an element is sent)")
    figure = empty(
        120 + 22 * len(shown), columns=2, shared_yaxes=True, horizontal_spacing=0.04,
        subplot_titles=titles,
    )  # fmt: skip
    names = [_label(variables[i]) for i in shown]
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
        name = _label(variables[i])
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

    values = [[round(math.log10(v), 3) if v else None for v in row] for row in norms.values()]
    names = [_label(variables[i]) for i in norms]
    rows = list(range(len(names)))
    figure = empty(140 + 12 * len(names))
    figure.add_trace(
        go.Heatmap(
            x=list(steps), y=rows, z=values, colorscale="Viridis", colorbar_title="log10 norm",
            hovertemplate="%{y}<br>step %{x}<br>%{z}<extra></extra>",  # y as its tick's text
        )
    )  # fmt: skip
    figure.update_yaxes(tickvals=rows, ticktext=names, autorange="reversed", tickfont_size=9)
    figure.update_xaxes(title_text="step")
    return figure.update_layout(margin={"l": 190}, title={"text": "all residuals", "font_size": 13})


def _label(variable: dict[str, Any]) -> str:
    """Return a variable's short name as text for plotly, which understands some HTML."""
    return html.escape(short_name(variable["name"]))


def short_name(name: str, at_most: int = 26) -> str:
    """Return the end of a variable's path, which identifies it."""
    parts = name.split("/")
    while len(parts) > 2 and len("/".join(parts)) > at_most:
        parts = parts[1:]
    end = "/".join(parts)
    return end if len(end) <= at_most else "…" + end[1 - at_most :]
