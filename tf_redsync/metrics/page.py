"""The HTML report of a training: one file, without network access. Needs plotly."""

from __future__ import annotations

import dataclasses
import html
import os
from pathlib import Path
from typing import Any

from tf_redsync.metrics import figures
from tf_redsync.metrics.records import History, Worker, is_records, load

NAME = "report.html"
# Makes browsers refuse content from a network.
_ALLOWED = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 2em auto;
       padding: 0 1em; background: #fff; }
h1 { font-size: 1.6em; margin-bottom: 0; } h2 { font-size: 1.2em; margin: 2em 0 0; }
p { margin: .4em 0; } p.what { color: #555; max-width: 52em; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(11.5em, 1fr)); gap: .6em; }
dl div { border: 1px solid #ddd; border-radius: 6px; padding: .4em .8em; }
dt { color: #555; font-size: .85em; } dd { margin: 0; font-size: 1.2em; font-weight: 600; }
pre { background: #f6f6f6; border-radius: 6px; padding: .8em; overflow-x: auto; font-size: 12px; }
p.answer { font-size: 1.1em; }
ul.notes { background: #fff8e1; border-radius: 6px; padding: .6em 2em; }
"""


class ReportError(RuntimeError):
    """A report cannot be made; the message has the cause and the remedy."""


def report(run_dir: str | os.PathLike[str], output: str | os.PathLike[str] | None = None) -> Path:
    """Write an HTML report of a training that `CompressionMetrics(run_dir)` recorded.

    The report shows the loss against steps, time and bytes; the bytes sent; the parts of a step's
    time; density, residual and staleness by layer; and the decision of `Auto` or the user. It
    covers the files of all workers in the directory and needs no network. The training may still
    run. Requires plotly, which `pip install 'tf_redsync[report]'` installs.

    Args:
        run_dir: The directory that was passed to `CompressionMetrics`.
        output: The file to write; `None` for `report.html` in `run_dir`.

    Returns:
        The path of the report.

    Raises:
        FileNotFoundError: `run_dir` has no records, or the directory of `output` does not exist.
        ValueError: an argument is not a path, or `output` is empty, a directory, or a file of
            `CompressionMetrics`.
        ReportError: plotly is not installed, or the records cannot be used.

    Example:
        >>> import tf_redsync as rs
        >>> # rs.report("/tmp/run1")
    """
    for name, given in (("run_dir", run_dir), ("output", NAME if output is None else output)):
        if not isinstance(given, (str, os.PathLike)):
            raise ValueError(f"`{name}` must be a path. Received: {name}={given!r}")
    try:
        import plotly.graph_objects  # noqa: F401
    except ImportError as error:
        raise ReportError(
            "a report needs plotly, which is not installed. Run pip install 'tf_redsync[report]' "
            "or pip install plotly."
        ) from error
    try:
        history = load(run_dir)
    except ValueError as error:
        raise ReportError(str(error)) from error
    except (AttributeError, TypeError) as error:
        raise _not_drawn(run_dir, error) from error
    path = _checked(Path(run_dir) / NAME if output is None else output)
    try:
        text = _page(history, os.fspath(run_dir))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _not_drawn(run_dir, error) from error
    part = path.with_name(path.name + ".part")  # readers see a complete file only
    try:
        part.write_text(text, encoding="utf-8", errors="replace")  # of paths that are not UTF-8
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def _not_drawn(run_dir: str | os.PathLike[str], error: Exception) -> ReportError:
    return ReportError(
        f"the records cannot be drawn ({type(error).__name__}: {error}). If only "
        "CompressionMetrics has written into `run_dir`, this is a bug: please report it with the "
        "traceback of tf_redsync.report(run_dir). Otherwise a field has an unexpected type. "
        f"Received: run_dir={os.fspath(run_dir)!r}"
    )


def _checked(output: str | os.PathLike[str]) -> Path:
    """Return the path of the file to write."""
    path, received = Path(output), f"Received: output={os.fspath(output)!r}"
    if not os.fspath(output) or path.is_dir():
        raise ValueError(f"`output` must be a file, not a directory. {received}")
    if is_records(path):
        raise ValueError(f"`output` must not be a file of CompressionMetrics. {received}")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"`output` must be a file in an existing directory. {received}")
    return path


def _page(history: History, source: str) -> str:
    from plotly.offline import get_plotlyjs

    worker = history.first
    title = f"{worker.run.get('model', 'model')}: {methods_of(worker)[0]}"
    sections = [
        ("Loss", figures.loss_text(worker), [figures.loss(worker)]),
        ("Bytes", figures.BYTES, [figures.sent(worker)]),
        ("Time", figures.TIME, figures.time(history)),
        ("Layers", figures.LAYERS, figures.layers(worker)),
    ]
    head = (f"<h1>{_escaped(title)}</h1>", _answer(history), _facts(history, source))
    body = [*head, _notes(history)]
    for heading, text, drawn in sections:
        body.append(f"<h2>{heading}</h2><p class='what'>{text}</p>")
        body += [_embedded(figure) for figure in drawn]
    decision = str(worker.run.get("decision") or "")
    if decision:
        trial = next((e["trial"] for e in reversed(worker.epochs) if e.get("trial")), None)
        result = f"<p>In the trial during training, {trial} steps were faster.</p>"
        body.append(f"<h2>The decision of Auto</h2>{result if trial else ''}{_text(decision)}")
    body.append("<h2>The method of every variable</h2><p class='what'><code>explain()</code>:</p>")
    body.append(_text(str(worker.run.get("explained", "")).replace(decision, "").rstrip()))
    return (
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{_ALLOWED}">'
        "<link rel='icon' href='data:,'>"
        f"<title>{_escaped(title)} - tf_redsync</title><style>{_STYLE}</style>"
        f"<script>{get_plotlyjs()}</script></head><body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _escaped(text: Any) -> str:
    return html.escape(str(text))


def _text(text: str) -> str:
    return f"<pre>{_escaped(text)}</pre>"


def _embedded(figure: Any) -> str:
    config = {"displayModeBar": False, "responsive": True}
    return str(figure.to_html(full_html=False, include_plotlyjs=False, config=config))


def methods_of(worker: Worker) -> list[str]:
    """Return the names of the variables' methods, by their number of elements."""
    elements: dict[str, int] = {}
    for variable in worker.run.get("variables", ()):
        name = variable["method"]
        elements[name] = elements.get(name, 0) + variable["elements"]
    return sorted(elements, key=lambda n: -elements[n]) or ["no variables"]


# ------------------------------------------------------------------------------------ the head


def _answer(history: History) -> str:
    """Return the head's text: saved bytes, measured accuracy losses, and the parts of a step."""
    worker = history.first
    traffic, sentences = _traffic(worker), []
    if traffic.ratio:
        bytes_ = f"{size(traffic.sent)} instead of {size(traffic.dense)}"
        since = f" after step {traffic.first:,}" if traffic.first else ""
        sentences.append(f"Each worker sent {bytes_}{since}, {traffic.ratio:,.1f} times less.")
    known = worker.run.get("known_losses") or {}
    largest = methods_of(worker)[0]
    if largest in known:
        sentences.append(
            f"The known loss of accuracy of {largest}: {known[largest]} (docs/accuracy.md)."
        )
    split = next((w.splits[-1] for w in history.workers if w.splits), None)
    if split is not None:
        parts = [(split.get(f"{part}_ms"), part) for part in figures.PARTS]
        times = sorted(((ms, part) for ms, part in parts if ms), reverse=True)
        spent = ", ".join(f"{part} {ms:,.1f}" for ms, part in times)
        sentences.append(f"A step's milliseconds: {spent}.")
    return f"<p class='answer'>{_escaped(' '.join(sentences))}</p>" if sentences else ""


def _facts(history: History, source: str) -> str:
    worker = history.first
    run, last = worker.run, worker.samples[-1] if worker.samples else {}
    traffic = _traffic(worker)
    workers = int(run.get("workers", 1))
    versions = run.get("versions") or {}
    facts = {
        "workers": f"{workers} ({len(history.workers)} recorded)",
        "optimizer": run.get("optimizer"),
        "methods": ", ".join(methods_of(worker)),
        "steps": _steps(traffic),
        "loss": _short(_last_loss(worker)),
        "sent by a worker": size(traffic.sent),
        "dense would be": size(traffic.dense) if workers > 1 else None,
        "compression": f"{traffic.ratio:,.1f} times" if traffic.ratio else None,
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


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes of a worker in the recorded steps, which may begin after the training's first step.

    Attributes:
        sent: Bytes sent; `None` if unknown.
        dense: Bytes that dense all-reduces would send.
        first: Step after which the records begin.
        last: Last recorded step.
    """

    sent: float | None
    dense: float
    first: int
    last: int

    @property
    def ratio(self) -> float | None:
        """`dense` divided by `sent`; `None` if either is 0 or unknown."""
        return self.dense / self.sent if self.sent and self.dense else None


def _traffic(worker: Worker) -> Traffic:
    first, before = worker.start.get("step") or 0, worker.start.get("bytes_sent") or 0.0
    points = [(s, s.get("bytes_sent")) for s in worker.samples]
    points += [(e, (e.get("logs") or {}).get("bytes_sent")) for e in worker.epochs]
    sent, dense, last = None, 0.0, first
    for record, so_far in sorted(points, key=lambda pair: pair[0].get("step") or 0):
        step = max(record.get("step") or 0, last)
        dense, last = dense + (record.get("dense_bytes") or 0.0) * (step - last), step
        sent = sent if so_far is None else so_far - before
    return Traffic(sent, dense, first, last)


def _steps(traffic: Traffic) -> str:
    recorded = f" ({traffic.last - traffic.first:,} recorded)" if traffic.first else ""
    return f"{traffic.last:,}{recorded}"


def _last_loss(worker: Worker) -> float | None:
    """Return the last recorded loss, of a sample or an epoch."""
    logged = [
        (r.get("step") or 0, (r.get("logs") or {}).get("loss"))
        for r in (*worker.samples, *worker.epochs)
    ]
    known = [pair for pair in logged if pair[1] is not None]
    return max(known, key=lambda pair: pair[0], default=(0, None))[1]


def _notes(history: History) -> str:
    if not history.notes:
        return ""
    items = "".join(f"<li>{_escaped(note)}</li>" for note in history.notes)
    return f"<ul class='notes'>{items}</ul>"


def size(count: float | None) -> str | None:
    """Return a number of bytes with a unit."""
    if count is None:
        return None
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= 0.9995 * factor:  # three digits round it up
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
