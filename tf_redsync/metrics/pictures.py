"""The pictures of a report: loss, bytes, time. Needs plotly."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import Any

from tf_redsync.metrics.history import History, Worker, column

PARTS = {  # of a step, as they are stacked: what adds up to it, with colours
    "compute": "#4c78a8",
    "select": "#f58518",
    "decode": "#54a24b",
    "input": "#b279a2",
    "wait": "#e45756",
}


def empty(height: int, rows: int = 1, columns: int = 1, **options: Any) -> Any:
    """Return a figure with room for plots side by side."""
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
    """Return the loss of each sample, where Keras has logged one."""
    return [(sample.get("logs") or {}).get("loss") for sample in worker.samples]


def loss_text(worker: Worker) -> str:
    """Return what stands above the pictures of the loss."""
    text = (
        "The loss as Keras logs it: its mean over the epoch so far, so it steps where an epoch "
        "begins. Against bytes: those that this worker has sent. "
    )
    if any("val_loss" in (e.get("logs") or {}) for e in worker.epochs):
        text += "Points: the validation's, at the end of an epoch."
    if not any(loss is not None for loss in losses(worker)):
        text = "The logs of <code>fit</code> had no <code>loss</code>."
    return text


def loss(worker: Worker) -> Any:
    """Draw the loss against steps, time and bytes."""
    import plotly.graph_objects as go

    figure = empty(
        340, columns=3, shared_yaxes=True, horizontal_spacing=0.03,
    )  # fmt: skip
    samples, found = worker.samples, losses(worker)
    sent = [_scaled(s.get("bytes_sent"), 1e-6) for s in samples]
    known = {s["step"]: i for i, s in enumerate(samples)}
    validated = [e for e in worker.epochs if (e.get("logs") or {}).get("val_loss") is not None]
    axes = (("step", column(samples, "step")), ("seconds", column(samples, "elapsed")))
    for number, (name, xs) in enumerate((*axes, ("MB sent", sent)), start=1):
        options: dict[str, Any] = {"showlegend": number == 1, "row": 1, "col": number}
        row = {"row": options.pop("row"), "col": options.pop("col")}
        line = go.Scatter(x=xs, y=found, name="loss", line_color="#4c78a8", **options)
        figure.add_trace(line, **row)
        if validated:
            at = [_at(e, number, known, sent) for e in validated]
            ys = [e["logs"]["val_loss"] for e in validated]
            points = go.Scatter(
                x=at, y=ys, name="val_loss", mode="markers", marker_color="#e45756", **options
            )
            figure.add_trace(points, **row)
        figure.update_xaxes(title_text=name, **row)
    return figure.update_yaxes(title_text="loss", col=1)


def _at(
    epoch: dict[str, Any], axis: int, known: dict[int, int], sent: Sequence[float | None]
) -> float | None:
    """Where an epoch's end is on one of the axes of the losses."""
    if axis < 3:
        found: float | None = epoch.get("step" if axis == 1 else "elapsed")
        return found
    own = (epoch.get("logs") or {}).get("bytes_sent")
    if own is not None:
        return _scaled(own, 1e-6)
    return sent[known[epoch["step"]]] if epoch.get("step") in known else None


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


BYTES = (
    "What this worker sends, as the library counts it: the payloads in ring collectives, without "
    "the frames of TCP and gRPC. Each point is the mean of the steps since the one before."
)


def sent(worker: Worker) -> Any:
    """Draw the bytes a step, and the compression ratio."""
    import plotly.graph_objects as go

    figure = empty(
        300, columns=2, subplot_titles=("bytes a step", "compression ratio"), horizontal_spacing=0.1
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


TIME = (
    "Left: the mean time of a step, from the start of <code>train_step</code> to its end. Right: "
    "where it goes, from a profile of a few steps. The stacked parts add up to the step: "
    "<b>compute</b> is the model and the optimizer, <b>select</b> makes what is sent, "
    "<b>decode</b> adds up what was received, in <b>input</b> the step waits for its batch, and in "
    "<b>wait</b> nothing of these runs: the network, slower workers, or TensorFlow itself. "
    "<b>exchange</b>, the black line, is how long collectives were under way, beside the others or "
    "not; one worker cannot tell the network's time in it from the time that others are late."
)


def time(history: History) -> list[Any]:
    """Draw the time of a step, and where it goes."""
    import plotly.graph_objects as go

    split = next((w for w in history.workers if w.splits), None)
    columns = 2 if split else 1
    figure = empty(360, columns=columns, horizontal_spacing=0.1)
    for worker in history.workers[:8]:
        steps, times = column(worker.samples, "step"), column(worker.samples, "step_ms")
        figure.add_trace(
            go.Scatter(x=steps, y=times, name=f"worker {worker.rank}", legend="legend"),
            row=1, col=1,
        )  # fmt: skip
    figure.update_yaxes(title_text="ms a step", rangemode="tozero")
    figure.update_xaxes(title_text="step", row=1, col=1)
    if split is None:
        why = history.first.no_split or "none had ended when this page was made"
        figure.add_annotation(
            text=f"no profile: {_wrapped(why)}", xref="paper", yref="paper", x=0.5, y=0.95,
            showarrow=False,
        )  # fmt: skip
        return [figure]
    shown = _last_splits(history)
    names = [f"worker {rank}<br>step {record['step']:,}" for rank, record in shown]
    for part, color in PARTS.items():
        values = [record.get(f"{part}_ms") for _, record in shown]
        bar = go.Bar(x=names, y=values, name=part, marker_color=color, legend="legend2")
        figure.add_trace(bar, row=1, col=2)
    exchange = go.Scatter(
        x=names, y=[record.get("exchange_ms") for _, record in shown], name="exchange",
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


def _last_splits(history: History, at_most: int = 6) -> list[tuple[int, dict[str, Any]]]:
    """The last profile of each worker; of a single worker, its last ones."""
    with_splits = [w for w in history.workers if w.splits]
    if len(with_splits) == 1:
        return [(with_splits[0].rank, s) for s in with_splits[0].splits[-at_most:]]
    return [(w.rank, w.splits[-1]) for w in with_splits[:at_most]]


def _wrapped(text: str, width: int = 70) -> str:
    return re.sub(rf"(.{{1,{width}}})(?:\s+|$)", r"\1<br>", html.escape(text)).removesuffix("<br>")
