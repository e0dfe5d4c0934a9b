"""Results of the rows: a resumable file, a table, a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]


class Report:
    """The rows so far, in a file if a path is given.

    Args:
        settings: Settings that all rows share.
        path: Path of the file, or `None`.

    Raises:
        ValueError: if the file has rows with other settings or other content, or if the state
            beside it has other settings.
    """

    def __init__(self, settings: dict[str, Any], path: Path | None):
        self.settings, self.path = settings, path
        self.rows: list[Row] = []
        if self.saved is not None and self.saved.exists():
            found = state_of(self.saved).get("settings", settings)
            self._check(found, f"a state, {self.saved.name},")
        if path is None or not path.exists():
            return
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            found, self.rows = kept["settings"], kept["rows"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"`--json` is no report of this benchmark. Received: {path}"
            ) from error
        self._check(found, "rows")

    def _check(self, found: dict[str, Any], what: str) -> None:
        """Raises unless the given settings equal those of this call."""
        settings = self.settings
        different = [k for k in {**found, **settings} if found.get(k) != settings.get(k)]
        if different:
            text = ", ".join(f"{k} {found.get(k)} and not {settings.get(k)}" for k in different)
            raise ValueError(
                f"`--json` has {what} of other settings ({text}): give another file, or the flags "
                f"that it was begun with. Received: --json={self.path}"
            )

    def row(self, method: str, seed: int) -> Row | None:
        """Returns a row, or `None` if it is not done."""
        matching = (r for r in self.rows if (r["method"], r["seed"]) == (method, seed))
        return next(matching, None)

    def add(self, row: Row) -> None:
        """Adds or replaces a row, and writes the file."""
        same = (row["method"], row["seed"])
        self.rows = [r for r in self.rows if (r["method"], r["seed"]) != same] + [row]
        if self.path is not None:
            temporary = self.path.with_suffix(".part")
            content = {"settings": self.settings, "rows": self.rows}
            temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            temporary.replace(self.path)

    @property
    def saved(self) -> Path | None:
        """Path of the state of the row in training."""
        return None if self.path is None else self.path.with_suffix(".state.npz")


def state_of(path: Path) -> dict[str, Any]:
    """Returns everything that `Training.save` wrote, except the tensors."""
    with np.load(path, allow_pickle=False) as archive:
        return json.loads(archive["rest"].tobytes())


def summaries(rows: Sequence[Row]) -> list[Row]:
    """Returns means over the seeds of each method, in order of appearance.

    `spread` is the standard deviation of the metric (n - 1).
    """  # noqa: D205
    found = []
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [r for r in rows if r["method"] == method]
        done = [r for r in own if "metric" in r]
        summary: Row = {"method": method, "seeds": len(done)}
        if error := next((r["error"] for r in own if "error" in r), None):
            summary["error"] = error
        if done:
            for key in ("metric", "loss", "bits", "bits_after", "sent_bytes", "seconds"):
                if key in done[0]:
                    summary[key] = float(np.mean([r[key] for r in done]))
            if len(done) > 1:
                summary["spread"] = float(np.std([r["metric"] for r in done], ddof=1))
        found.append(summary)
    return found


def table(rows: Sequence[Row], metric: str) -> str:
    """Returns the rows as a table in Markdown."""
    head = ["method", "seeds", metric, "spread", "loss", "bits", "bits after", "sent KB", "s"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in summaries(rows):
        if "metric" in row:
            cells = [
                _number(row, "metric", ".2f"), _number(row, "spread", ".2f"),
                _number(row, "loss", ".4f"), _number(row, "bits", ".4f"),
                _number(row, "bits_after", ".4f"), _number(row, "sent_bytes", ".3f", 1e-3),
                _number(row, "seconds", ".0f"),
            ]  # fmt: skip
        else:
            cells = ["-"] * 7
        note = f" ({row['error']})" if "error" in row else ""
        lines.append(
            "| " + " | ".join([f"`{row['method']}`{note}", str(row["seeds"]), *cells]) + " |"
        )
    return "\n".join(lines)


def _number(row: Row, key: str, form: str, factor: float = 1.0) -> str:
    return format(factor * row[key], form) if key in row else "-"


def plot(rows: Sequence[Row], metric: str, title: str, path: str) -> None:
    """Plots the metric during the training, and its final value over the bits."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5))
    left, right = figure.subplots(1, 2)
    for i, summary in enumerate(s for s in summaries(rows) if "metric" in s):
        own = [r for r in rows if r["method"] == summary["method"] and "metric" in r]
        values = np.array([r["curve"]["metric"] for r in own])
        steps, color = own[0]["curve"]["steps"], colormaps["tab20"](i % 20)
        left.plot(steps, values.mean(axis=0), color=color, label=summary["method"])
        left.fill_between(steps, values.min(axis=0), values.max(axis=0), color=color, alpha=0.2)
        if "bits" in summary:
            right.errorbar(
                summary["bits"], summary["metric"], yerr=summary.get("spread"),
                marker="o", color=color,
            )  # fmt: skip
    left.set(xlabel="steps", ylabel=metric, title=title)
    right.set(xlabel="bits per weight and step, whole run", ylabel=metric, xscale="log")
    if metric == "perplexity":
        left.set_yscale("log")
    left.legend(fontsize=7)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
