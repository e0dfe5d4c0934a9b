"""Minutes until training is nearly as good as dense, on measured networks.

    sudo python benchmarks/step/step_time.py --model resnet9 --workers 4 --rate 100mbit \
        --json steps.json --methods "Dense(),CodedGMC(density=0.03)"
    python -m benchmarks.accuracy.time_to_accuracy --measured steps.json --setup resnet9 \
        --folder docs/accuracy/standard --plot minutes.png

combines step times from reports of `benchmarks/step/step_time.py` or `benchmarks/peers`, for the
same network and global batch, with the accuracy or perplexity curves of the full runs of
`benchmarks/accuracy/standard_runs.py`. Steps of another number of workers use the accuracy of those
runs, as do steps of PyTorch that of the same algorithm here.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy.standard_runs import SETUPS, Setup, row_of, runs_of
from benchmarks.methods.time_to_loss import steps_to
from benchmarks.scale.traffic import bits_per_second

# The methods of `benchmarks/peers/pytorch_ddp.py`, as arms of the standard runs.
PYTORCH = {"dense": "Dense()", "fp16": "HalfPrecision()", "powersgd": "PowerSGD(rank=4)"}
SHARES = (0.98, 0.995)  # of the baseline's final accuracy; or its perplexity divided by these


@dataclasses.dataclass(frozen=True)
class Course:
    """Learning curve of a method on a network.

    Attributes:
        network: Rate and number of workers.
        method: Expression of the method; for PyTorch, after its name.
        step_ms: Mean time of a step.
        steps: Steps of the evaluations.
        metric: Means over the seeds at these steps.
        seeds: Number of seeds.
        dense: Final metric of the dense baseline.
        sign: 1 where a larger metric is better, else -1.
    """

    network: str
    method: str
    step_ms: float
    steps: list[float]
    metric: list[float]
    seeds: int
    dense: float
    sign: int = 1

    @property
    def goals(self) -> list[float]:
        """The metrics to reach."""
        return [share**self.sign * self.dense for share in SHARES]

    def minutes_to(self, metric: float) -> float | None:
        """Returns the time at which the metric is first reached; `None` if it never is."""
        falling = [-self.sign * value for value in self.metric]
        steps = steps_to({"steps": self.steps, "metric": falling}, -self.sign * metric)
        return None if steps is None else steps * self.step_ms / 60e3

    @property
    def minutes(self) -> list[float]:
        """Times of the evaluations in minutes."""
        return [steps * self.step_ms / 60e3 for steps in self.steps]


def courses(
    setup: Setup,
    folder: Path,
    reports: Sequence[dict[str, Any]],
    setups: Sequence[Setup] = SETUPS,
) -> list[Course]:
    """Returns the curves of all methods that were trained and measured, network by network.

    The goals need the rows of the dense baseline, but no step time of it.

    Args:
        setup: One of `setups`.
        folder: Folder of the rows.
        reports: Reports of `step_time.py` or `flat`.
        setups: Contains the setup whose rates `setup` uses.

    Raises:
        ValueError: A report is of another network or global batch.
    """
    for report in reports:
        _check(report, setup)
    rows: dict[str, list[dict[str, Any]]] = {arm.method: [] for arm in setup.arms}
    for run in runs_of(setups, folder):
        row = None if run.grid or run.setup is not setup else row_of(run, folder)
        if row and "metric" in row:
            rows[run.arm.method].append(row)
    baseline = rows[setup.arms[0].method]
    if not baseline:
        return []
    dense = float(np.mean([row["curve"]["metric"][-1] for row in baseline]))
    found = []
    for report in sorted(reports, key=lambda r: (r["workers"], bits_per_second(r["rate"]))):
        rate = report["rate"].replace("mbit", " Mbit/s").replace("gbit", " Gbit/s")
        network = f"{rate}, {report['workers']} workers"
        for algorithm, own in rows.items():
            for method, timed in report["methods"].items():
                if _algorithm(method) != algorithm or not own or "step_ms" not in timed:
                    continue
                metric = np.mean([row["curve"]["metric"] for row in own], axis=0).tolist()
                steps, ms = own[0]["curve"]["steps"], timed["step_ms_mean"]
                course = Course(network, method, ms, steps, metric, len(own), dense, setup.sign)
                found.append(course)
    return found


def _algorithm(method: str) -> str:
    """Returns the method of the standard runs with the same algorithm as a method of a report."""
    return PYTORCH.get(method.removeprefix("PyTorch "), method)


def flat(report: dict[str, Any]) -> dict[str, Any]:
    """Converts a report of `benchmarks/peers` to the format of `step_time.py`."""
    if "peers" not in report:
        return report
    own, other = (report["peers"].get(name, {}) for name in ("tf_redsync", "pytorch"))
    pytorch = {f"PyTorch {name}": row for name, row in other.get("methods", {}).items()}
    batch = own.get("batch", other.get("batch"))
    return {**report, "batch": batch, "methods": {**own.get("methods", {}), **pytorch}}


def _check(report: dict[str, Any], setup: Setup) -> None:
    """Raises unless a report has the same network and batch as the runs of a setup."""
    flags = dict(zip(setup.flags, setup.flags[1:], strict=False))
    model, batch = flags.get("--model"), flags.get("--batch")
    if model is not None and model != report["model"]:
        raise ValueError(
            f"the steps of setup {setup.name!r} have model={model}. Received: a report of "
            f"model={report['model']}; measure with --model {model}"
        )
    workers, measured = int(flags.get("--workers", "4")), report["workers"]
    if batch is not None and workers * int(batch) != measured * report["batch"]:
        raise ValueError(
            f"the steps of setup {setup.name!r} have a global batch of {workers} x {batch}. "
            f"Received: a report of {measured} workers with batch={report['batch']}; measure with "
            f"--batch {workers * int(batch) // measured}"
        )


def table(found: Sequence[Course]) -> str:
    """Returns a table in Markdown: minutes until methods are nearly as good as dense training."""
    heads = [f"minutes to {100 * share:g} % of dense" for share in SHARES]
    if found[0].sign < 0:
        heads = [f"minutes to a perplexity of {goal:.2f}" for goal in found[0].goals]
    lines = [
        f"| network | method | seeds | ms a step | {' | '.join(heads)} |",
        "|---|---|---:|---:|" + "---:|" * len(SHARES),
    ]
    for c in found:
        times = [c.minutes_to(goal) for goal in found[0].goals]
        cells = " | ".join("-" if t is None else f"{t:.1f}" for t in times)
        lines.append(f"| {c.network} | `{c.method}` | {c.seeds} | {c.step_ms:.0f} | {cells} |")
    return "\n".join(lines)


def plot(found: Sequence[Course], path: Path) -> None:
    """Plots the metric against minutes, one panel per network, three in a row."""
    from matplotlib.figure import Figure

    networks = list(dict.fromkeys(c.network for c in found))
    algorithms = list(dict.fromkeys(_algorithm(c.method) for c in found))
    columns = min(len(networks), 3)
    rows = -(-len(networks) // columns)
    figure = Figure(figsize=(5.5 * columns, 4 * rows))
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    for panel in panels[len(networks) :]:
        panel.set_axis_off()
    for network, axis in zip(networks, panels, strict=False):
        for c in (c for c in found if c.network == network):
            style = f"C{algorithms.index(_algorithm(c.method))}"
            style += "--" if c.method.startswith("PyTorch") else "-"
            axis.plot(c.minutes, c.metric, style, marker="o", markersize=3, label=c.method)
        axis.axhline(found[0].goals[0], color="grey", linewidth=0.8, linestyle=":")
        axis.set_title(network)
        axis.set_xlabel("minutes")
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
    rising = found[0].sign > 0
    for axis in panels[::columns]:
        axis.set_ylabel("test accuracy, %" if rising else "test perplexity")
    panels[len(networks) - 1].legend(loc="lower right" if rising else "upper right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="time_to_accuracy", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    add = parser.add_argument
    add(
        "--measured",
        type=Path,
        nargs="+",
        required=True,
        help="JSON of step_time.py or of benchmarks.peers",
    )
    add("--setup", choices=[setup.name for setup in SETUPS], required=True)
    add("--folder", type=Path, required=True, help="of the rows")
    add("--plot", type=Path, help="PNG file")
    args = parser.parse_args(argv)
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in args.measured]
    reports = [flat(one) for report in reports for one in report.get("runs", [report])]
    setup = next(setup for setup in SETUPS if setup.name == args.setup)
    try:
        found = courses(setup, args.folder, reports)
    except ValueError as error:
        parser.error(str(error))
    if not found:
        print(
            "no method of these rows is in these reports, or there is no finished row of "
            f"{setup.arms[0].method}",
            file=sys.stderr,
        )
        return 1
    print(table(found))
    if args.plot:
        plot(found, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
