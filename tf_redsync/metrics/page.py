"""A page of HTML about a training: self-contained, without network access. Needs plotly."""

from __future__ import annotations

import html
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tf_redsync.metrics.history import History, Worker, column, load

NAME = "report.html"
PARTS = {  # of a step, as they are stacked: what adds up to it, with colours
    "compute": "#4c78a8",
    "select": "#f58518",
    "decode": "#54a24b",
    "input": "#b279a2",
    "wait": "#e45756",
}
_LINES = 10  # layers that get a line each
_SHOWN = 40  # layers in a bar chart; of more, the largest
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 2em auto;
       padding: 0 1em; background: #fff; }
h1 { font-size: 1.6em; margin-bottom: 0; } h2 { font-size: 1.2em; margin: 2em 0 0; }
p { margin: .4em 0; } p.what { color: #555; max-width: 52em; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(11.5em, 1fr)); gap: .6em; }
dl div { border: 1px solid #ddd; border-radius: 6px; padding: .4em .8em; }
dt { color: #555; font-size: .85em; } dd { margin: 0; font-size: 1.2em; font-weight: 600; }
pre { background: #f6f6f6; border-radius: 6px; padding: .8em; overflow-x: auto; font-size: 12px; }
ul.notes { background: #fff8e1; border-radius: 6px; padding: .6em 2em; }
"""


class ReportError(RuntimeError):
    """A report cannot be made; the text says why, and what to do."""


def report(run_dir: str | os.PathLike[str], output: str | os.PathLike[str] | None = None) -> Path:
    """Write a page about a training that `CompressionMetrics(run_dir)` has recorded.

    Loss against steps, time and bytes; bytes; where the time of a step goes; density, residual and
    staleness by layer; and what `Auto` or the user has decided. The page needs no network; the
    training may still run. All workers' files in the directory are read. Needs plotly, which
    `pip install 'tf_redsync[report]'` installs.

    Args:
        run_dir: The directory that was given to `CompressionMetrics`.
        output: The file to write; `None` for `report.html` in `run_dir`.

    Returns:
        Its path.

    Raises:
        FileNotFoundError: if nothing was recorded there, or the folder of `output` is not there.
        ReportError: if plotly is not installed, or the records cannot be used.

    Example:
        >>> import tf_redsync as rs
        >>> # rs.report("/tmp/run1")
    """
    try:
        import plotly.graph_objects  # noqa: F401
    except ImportError as error:
        raise ReportError(
            "a report needs plotly, which is not installed: pip install 'tf_redsync[report]', or "
            "plotly."
        ) from error
    try:
        history = load(run_dir)
    except ValueError as error:
        raise ReportError(str(error)) from error
    path = Path(run_dir) / NAME if output is None else Path(output)
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(
            "`output` must be a file in a directory that exists. Received: "
            f"output={os.fspath(path)!r}"
        )
    text = _page(history, os.fspath(run_dir))
    part = path.with_name(path.name + ".part")  # nobody sees half a page
    part.write_text(text, encoding="utf-8")
    part.replace(path)
    return path


def _page(history: History, source: str) -> str:
    from plotly.offline import get_plotlyjs

    worker = history.first
    title = f"{worker.run.get('model', 'model')}, {method_name(worker)}"
    sections = [
        ("Loss", _loss_text(worker), [_loss(worker)]),
        ("Bytes", _BYTES, [_bytes(worker)]),
        ("Time", _TIME, _time(history)),
        ("Layers", _LAYERS, _layers(worker)),
    ]
    body = [f"<h1>{_escaped(title)}</h1>", _facts(history, source), _notes(history)]
    for heading, text, figures in sections:
        body.append(f"<h2>{heading}</h2><p class='what'>{text}</p>")
        body += [_embedded(figure) for figure in figures]
    decision = str(worker.run.get("decision") or "")
    if decision:
        trial = next((e["trial"] for e in reversed(worker.epochs) if e.get("trial")), None)
        said = f"<p>In its trial in training, {trial} steps were the faster ones.</p>"
        body.append(f"<h2>The decision of Auto</h2>{said if trial else ''}{_text(decision)}")
    body.append(
        "<h2>What happens to every variable</h2><p class='what'><code>explain()</code>:</p>"
    )
    body.append(_text(str(worker.run.get("explained", "")).replace(decision, "").rstrip()))
    return (
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<link rel='icon' href='data:,'>"
        f"<title>{_escaped(title)} - tf_redsync</title><style>{_STYLE}</style>"
        f"<script>{get_plotlyjs()}</script></head><body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _escaped(text: Any) -> str:
    return html.escape(str(text))


def _text(text: str) -> str:
    return f"<pre>{_escaped(text)}</pre>"


def _embedded(figure: Any) -> str:
    config = {"displaylogo": False, "responsive": True}
    return str(figure.to_html(full_html=False, include_plotlyjs=False, config=config))


def method_name(worker: Worker) -> str:
    """Return the names of the methods that the variables are exchanged by, the main one first."""
    elements: dict[str, int] = {}
    for variable in worker.run.get("variables", ()):
        name = variable["method"]
        elements[name] = elements.get(name, 0) + variable["elements"]
    return ", ".join(sorted(elements, key=lambda n: -elements[n])) or "no method"


# ------------------------------------------------------------------------------------ the head


def _facts(history: History, source: str) -> str:
    worker = history.first
    run, last = worker.run, worker.samples[-1] if worker.samples else {}
    sent, step = last.get("bytes_sent"), last.get("step") or 0
    dense = (run.get("dense_bytes") or 0.0) * step
    workers = int(run.get("workers", 1))
    versions = run.get("versions") or {}
    facts = {
        "workers": f"{workers} ({len(history.workers)} recorded)",
        "optimizer": run.get("optimizer"),
        "steps": f"{step:,}",
        "loss": _short(_losses(worker)[-1] if worker.samples else None),
        "sent by a worker": size(sent),
        "dense would be": size(dense) if workers > 1 else None,
        "compression": f"{dense / sent:,.1f} times" if sent and dense else None,
        "density, last sample": _percent(last.get("density")),
        "skipped steps": last.get("skipped_steps"),
        "step": _ms(last.get("step_ms")),
        "training": _duration(last.get("elapsed")),
        "tf_redsync": versions.get("tf_redsync"),
    }
    cells = (
        f"<div><dt>{_escaped(name)}</dt><dd>{_escaped(value)}</dd></div>"
        for name, value in facts.items()
        if value is not None
    )
    return f"<p class='what'>{_escaped(source)}</p><dl>{''.join(cells)}</dl>"


def _notes(history: History) -> str:
    if not history.notes:
        return ""
    items = "".join(f"<li>{_escaped(note)}</li>" for note in history.notes)
    return f"<ul class='notes'>{items}</ul>"


def size(count: float | None) -> str | None:
    """Return a number of bytes in words."""
    if count is None:
        return None
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= factor:
            return f"{count / factor:,.3g} {unit}"
    return f"{count:,.0f} bytes"


def _short(value: float | None) -> str | None:
    return None if value is None else f"{value:.4g}"


def _ms(value: float | None) -> str | None:
    return None if value is None else f"{value:,.1f} ms"


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.3g} %"


def _duration(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s"


# ------------------------------------------------------------------------------------ pictures


def _figure(height: int, rows: int = 1, columns: int = 1, **options: Any) -> Any:
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=rows, cols=columns, **options)
    return figure.update_layout(
        template="plotly_white",
        height=height,
        margin={"l": 70, "r": 20, "t": 40, "b": 50},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        font={"size": 12},
    )


def _losses(worker: Worker) -> list[float | None]:
    return [(sample.get("logs") or {}).get("loss") for sample in worker.samples]


def _loss_text(worker: Worker) -> str:
    text = (
        "The loss as Keras logs it: its mean over the epoch so far, so it steps where an epoch "
        "begins. Against bytes: those that this worker has sent. "
    )
    if any("val_loss" in (e.get("logs") or {}) for e in worker.epochs):
        text += "Points: the validation's, at the end of an epoch."
    if not any(loss is not None for loss in _losses(worker)):
        text = "The logs of <code>fit</code> had no <code>loss</code>."
    return text


def _loss(worker: Worker) -> Any:
    import plotly.graph_objects as go

    figure = _figure(
        340, columns=3, shared_yaxes=True, horizontal_spacing=0.03,
    )  # fmt: skip
    samples, losses = worker.samples, _losses(worker)
    sent = [_scaled(s.get("bytes_sent"), 1e-6) for s in samples]
    known = {s["step"]: i for i, s in enumerate(samples)}
    validated = [e for e in worker.epochs if (e.get("logs") or {}).get("val_loss") is not None]
    axes = (("step", column(samples, "step")), ("seconds", column(samples, "elapsed")))
    for number, (name, xs) in enumerate((*axes, ("MB sent", sent)), start=1):
        options: dict[str, Any] = {"showlegend": number == 1, "row": 1, "col": number}
        row = {"row": options.pop("row"), "col": options.pop("col")}
        line = go.Scatter(x=xs, y=losses, name="loss", line_color="#4c78a8", **options)
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


_BYTES = (
    "What this worker sends, as the library counts it: the payloads in ring collectives, without "
    "the frames of TCP and gRPC. Each point is the mean of the steps since the one before."
)


def _bytes(worker: Worker) -> Any:
    import plotly.graph_objects as go

    figure = _figure(
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
            figure.update_yaxes(type="log", dtick=1, row=1, col=1)
    ratio = column(worker.samples, "compression_ratio")
    figure.add_trace(go.Scatter(x=steps, y=ratio, line_color="#54a24b", **style), row=1, col=2)
    figure.update_yaxes(rangemode="tozero", row=1, col=2)
    figure.update_layout(margin_t=50)
    return figure.update_xaxes(title_text="step")


_TIME = (
    "Left: the mean time of a step, from the start of <code>train_step</code> to its end. Right: "
    "where it goes, from a profile of a few steps. The stacked parts add up to the step: "
    "<b>compute</b> is the model and the optimizer, <b>select</b> makes what is sent, "
    "<b>decode</b> adds up what was received, in <b>input</b> the step waits for its batch, and in <b>wait</b> "
    "nothing of these runs: the network, slower workers, or TensorFlow itself. "
    "<b>exchange</b>, the black line, is how long collectives were under way, beside the others or "
    "not; one worker cannot tell the network's time in it from the time that others are late."
)


def _time(history: History) -> list[Any]:
    import plotly.graph_objects as go

    split = next((w for w in history.workers if w.splits), None)
    columns = 2 if split else 1
    figure = _figure(360, columns=columns, horizontal_spacing=0.1)
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
    return re.sub(rf"(.{{1,{width}}})(?:\s+|$)", r"\1<br>", _escaped(text)).removesuffix("<br>")


_LAYERS = (
    "Of this worker. <b>Density</b>: share of a variable's elements that was sent, mean of all "
    "samples; 1 is dense. <b>Staleness</b>: after how many steps an element is sent, on average, "
    "which is 1 / density; of methods whose messages do not say how many elements they hold both "
    "follow from the method's settings. <b>Residual</b>: the norm of what waits; it "
    "grows at first, then stays where as much is delivered as comes in. Hover for the names."
)


def _layers(worker: Worker) -> list[Any]:
    variables = worker.run.get("variables", ())
    samples = [s for s in worker.samples if _fits(s, len(variables))]
    if not samples or not variables:
        return []
    largest = sorted(range(len(variables)), key=lambda i: -variables[i]["elements"])
    figures = [_density(variables, samples, sorted(largest[:_SHOWN]))]
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
    figure = _figure(
        120 + 22 * len(shown), columns=2, shared_yaxes=True, horizontal_spacing=0.04,
        subplot_titles=titles,
    )  # fmt: skip
    names = [short_name(variables[i]["name"]) for i in shown]
    tips = [
        f"{_escaped(variables[i]['name'])} {variables[i]['shape']}<br>{variables[i]['method']}, "
        f"{_escaped(variables[i]['how'])}"
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
    figure = _figure(380)
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
    figure = _figure(140 + 12 * len(names))
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
