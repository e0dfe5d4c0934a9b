"""Tables of step times on a network with a limited rate, measured by benchmarks/step."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks import netlab, workers
from benchmarks.accuracy.report import Report
from benchmarks.papers.declared import Row
from benchmarks.step import step_report, step_time


def run(rows: Sequence[Row], args: argparse.Namespace, kept: Report) -> None:
    """Measures all rows in turn, in all rounds that the report lacks.

    Rounds take the place of seeds. A failure is a row of the report too.
    """
    wanted = [(row, number) for number in range(args.rounds) for row in rows]
    missing = [(r, n) for r, n in wanted if kept.row(r.key, n) is None]
    if not missing:
        return
    progress = step_time.Progress(len(missing))
    with netlab.network(args.workers, args.rate) as lab:
        for row, number in missing:
            progress.begin(f"round {number + 1}/{args.rounds}: {row.what}")
            try:
                result = step_time.measure(lab, args.model, row.method, args)
            except workers.MeasurementError as error:
                result = {"error": workers.reason_of(str(error))}
            kept.add({"method": row.key, "seed": number, **result})
            progress.end(result.get("error") or f"{_median(result):9.1f} ms a step")


def _median(result: dict[str, Any]) -> float:
    return statistics.median(step_report.step_times(result))


def summary(row: Row, kept: Report, first: str) -> dict[str, Any]:
    """Returns the summary of all rounds of a row.

    Args:
        row: The row.
        kept: The report.
        first: Key of the reference row of `ratio`.

    Returns:
        The summary of `step_report.summary`, and `ratio`: the median over rounds of the row's
        median divided by that of the row `first`.
    """
    own = [r for r in kept.rows if r["method"] == row.key]
    failed = next((r["error"] for r in own if "error" in r), None)
    if failed is not None or not own:
        return {"error": failed or "not measured"}
    units = {r["seed"]: _median(r) for r in kept.rows if r["method"] == first and "error" not in r}
    ratios = [_median(r) / units[r["seed"]] for r in own if r["seed"] in units]
    ratio = {"ratio": statistics.median(ratios)} if ratios else {}
    return {**step_report.summary(own), **ratio}
