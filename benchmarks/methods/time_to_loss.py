"""Seconds until a language model reaches a perplexity, on measured networks.

    python benchmarks/methods/time_to_loss.py --measured steps.json \
        --folder docs/accuracy --perplexity 8.5

combines step times from a report of `benchmarks/step/step_time.py --model charlm` with the steps
that each method needs, from the rows of `benchmarks/methods/frontier.py --task charlm`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.methods.language_frontier import CONTENDERS, path_of


def steps_to(curve: dict[str, list[float]], perplexity: float) -> float | None:
    """Returns the number of steps until the test set reaches a perplexity; `None` if never.

    Interpolates linearly between evaluations; the first one counts as it is.
    """
    points = list(zip(curve["steps"], curve["metric"], strict=True))
    for (before, worse), (after, better) in zip(points, points[1:], strict=False):
        if worse <= perplexity:
            return float(before)
        if better <= perplexity:
            return before + (after - before) * (worse - perplexity) / (worse - better)
    return float(points[-1][0]) if points[-1][1] <= perplexity else None


def rows(
    measured: dict[str, Any], trained: argparse.Namespace, perplexity: float
) -> list[dict[str, Any]]:
    """Returns a row for each trained method, by network.

    A seed that diverged never reaches the perplexity, so its method has no number of steps.

    Args:
        measured: Report of `step_time.py --json`.
        trained: `folder`, `workers` and `steps` of the rows.
        perplexity: The target.
    """
    found = []
    for report in measured.get("runs", [measured]):
        for contender in CONTENDERS:
            timed = report["methods"].get(contender.method, {})
            path = path_of(trained, contender.group)
            kept = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
            own = [r for r in kept if r["method"] == contender.method]
            needed = [
                None if "error" in r else steps_to(r["curve"], perplexity)
                for r in own
                if "error" in r or "curve" in r
            ]
            if "step_ms" not in timed or not needed:
                continue
            reached = [n for n in needed if n is not None]
            steps = sum(reached) / len(reached) if len(reached) == len(needed) else None
            at_first = any(r["curve"]["metric"][0] <= perplexity for r in own if "curve" in r)
            mean = timed["step_ms_mean"]
            found.append({
                "network": f"{report['rate']}, {report.get('latency_ms', 0.0):g} ms, "
                           f"{report['workers']} workers",
                "name": f"{contender.name} {contender.setting}".strip(),
                "step_ms": mean,
                "steps": steps,
                "at_first": at_first,
                "seconds": None if steps is None else steps * mean / 1e3,
            })  # fmt: skip
    return found


def table(found: Sequence[dict[str, Any]], perplexity: float) -> str:
    """Returns a Markdown table by method and network: seconds, and ms per step in brackets.

    "<=" marks upper bounds: a seed had reached the perplexity at its first evaluation.
    """
    networks = list(dict.fromkeys(r["network"] for r in found))
    lines = [
        f"| method | steps to {perplexity:g} | {' | '.join(networks)} |",
        "|---|---:|" + "---:|" * len(networks),
    ]
    by_place = {(r["name"], r["network"]): r for r in found}
    for name in dict.fromkeys(r["name"] for r in found):
        own = [by_place.get((name, network)) for network in networks]
        steps = next(r["steps"] for r in own if r is not None)
        cells = []
        for r in own:
            seconds = "" if r is None else "-" if r["seconds"] is None else f"{r['seconds']:.0f}"
            cells.append("" if r is None else f"{seconds} ({r['step_ms']:.0f})")
        bound = "<= " if any(r["at_first"] for r in own if r is not None) else ""
        needed = "-" if steps is None else f"{bound}{steps:.0f}"
        lines.append(f"| {name} | {needed} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--measured", type=Path, nargs="+", required=True, help="reports of step_time.py --json")
    add("--perplexity", type=float, required=True)
    add("--folder", type=Path, required=True, help="of the rows")
    add("--workers", type=int, default=4, help="of the rows")
    add("--steps", type=int, default=1000, help="of the rows")
    args = parser.parse_args(argv)
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in args.measured]
    found = [row for measured in reports for row in rows(measured, args, args.perplexity)]
    print(table(found, args.perplexity))
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
