"""Steps of any method, including local steps, on slow links with a latency: predicted and measured.

    python benchmarks/scale/internet.py --measured steps_2.json steps_4.json --plot internet.png

compares reports of `benchmarks/step/step_time.py --latency` with the model of
`tf_redsync/planning/prediction.py`, which `tf-redsync plan` uses, and predicts more workers. A
report provides the number of workers, the rate, the round-trip time and the time of a step without
an exchange. The computation of methods is measured here. Nothing is fitted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks import arguments
from benchmarks.models import WORKLOADS
from benchmarks.scale.prediction import oversubscription
from benchmarks.scale.traffic import bits_per_second, bytes_per_second
from tf_redsync import launch

if TYPE_CHECKING:
    from tf_redsync.auto.cost import Work
    from tf_redsync.exchange.layout import TensorSpec
    from tf_redsync.methods import Method

NONE = "none"
PROBED = (2, 8)  # number of workers whose messages a method is timed with
TARGET = 0.2  # accepted error of a prediction
MORE = (2, 4, 8, 16, 32, 64)  # numbers of workers to predict


@dataclasses.dataclass(frozen=True)
class Network:
    """The network of a prediction.

    Attributes:
        workers: Number of workers.
        rate: Bits per second, such as `"10mbit"`.
        latency_ms: Round-trip time in milliseconds.
        share: Factor by which computation is slower because workers share cores.
    """

    workers: int
    rate: str
    latency_ms: float
    share: float = 1.0


class Model:
    """Predicts steps of a model.

    Args:
        specs: The model's variables.
        work: The computation of each method, by its expression.
        methods: The methods, by their expressions.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        methods: Mapping[str, Method],
        work: Mapping[str, Work],
    ):
        self._specs, self._methods, self._work = specs, methods, work

    def seconds(self, text: str, compute: float, network: Network) -> float:
        """Returns the time of a step, the mean over a round.

        Args:
            text: The method's expression.
            compute: Seconds of a step without an exchange.
            network: The network.
        """
        from tf_redsync.auto.cost import Link
        from tf_redsync.auto.decision import Measured
        from tf_redsync.planning import prediction

        rate = bytes_per_second(bits_per_second(network.rate))
        work = self._work[text]
        shared = dataclasses.replace(
            work,
            **{f.name: network.share * getattr(work, f.name) for f in dataclasses.fields(work)},
        )
        method = self._methods[text]
        link = Link.with_round_trips(rate, network.latency_ms / 1e3)
        measured = Measured(network.workers, link, {method: shared})
        return compute + prediction.total(method, self._specs, measured, compute).seconds


def model_of(reports: Sequence[Mapping[str, Any]]) -> Model:
    """Returns the model of all methods in some reports; measures their computation."""
    from tf_redsync.auto import probe
    from tf_redsync.exchange.layout import TensorSpec
    from tf_redsync.planning import prediction, subject

    variables = WORKLOADS[reports[0]["model"]].build().trainable_variables
    specs = [TensorSpec(v.path, tuple(v.shape), "float32", i) for i, v in enumerate(variables)]
    texts = dict.fromkeys(t for r in reports for t in r["methods"] if t != NONE)
    methods = {text: subject.parse_method(text) for text in texts}
    prediction.check(list(methods.values()))
    work = {text: probe.work(method, PROBED) for text, method in methods.items()}
    return Model(specs, methods, work)


def check(model: Model, reports: Sequence[Mapping[str, Any]], cores: int) -> list[dict[str, Any]]:
    """Compares measurements with predictions.

    Args:
        model: See `model_of`.
        reports: Reports of `step_time.py`, each with the method `none`.
        cores: Number of cores that all workers of a report shared.
    """
    rows = []
    for report in reports:
        share = oversubscription(report["workers"], report["threads"], cores)
        network = Network(report["workers"], report["rate"], report["latency_ms"], share)
        compute = report["methods"][NONE]["step_ms_mean"] / 1e3
        for text, timed in report["methods"].items():
            if text != NONE and "step_ms_mean" in timed:
                predicted = 1e3 * model.seconds(text, compute, network)
                rows.append({
                    "network": network,
                    "method": text,
                    "measured_ms": timed["step_ms_mean"],
                    "predicted_ms": predicted,
                    "error": predicted / timed["step_ms_mean"] - 1.0,
                })  # fmt: skip
    return rows


def check_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the comparison as Markdown: measured ms and the error of the prediction."""
    networks = list(dict.fromkeys(r["network"] for r in rows))
    heads = [f"{n.rate}, {n.workers} workers" for n in networks]
    lines = [f"| method | {' | '.join(heads)} |", "|---|" + "---:|" * len(networks)]
    found = {(r["method"], r["network"]): r for r in rows}
    for text in dict.fromkeys(r["method"] for r in rows):
        cells = []
        for network in networks:
            row = found.get((text, network))
            cells.append(
                "" if row is None else f"{row['measured_ms']:.1f} ({100 * row['error']:+.0f} %)"
            )
        lines.append(f"| `{text}` | {' | '.join(cells)} |")
    good = sum(abs(r["error"]) < TARGET for r in rows)
    lines.append(f"\n{good} of {len(rows)} predictions are within {100 * TARGET:.0f} %.")
    return "\n".join(lines)


def prediction_table(model: Model, texts: Sequence[str], compute: float, network: Network) -> str:
    """Returns predicted times in ms, of workers on separate machines, as Markdown."""
    lines = [
        f"| method | {' | '.join(map(str, MORE))} |",
        "|---|" + "---:|" * len(MORE),
    ]
    for text in texts:
        there = (dataclasses.replace(network, workers=p, share=1.0) for p in MORE)
        cells = (f"{1e3 * model.seconds(text, compute, n):.3g}" for n in there)
        lines.append(f"| `{text}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(rows: Sequence[Mapping[str, Any]], path: str) -> None:
    """Plots predicted over measured times."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 6))
    axes = figure.subplots()
    networks = list(dict.fromkeys(r["network"] for r in rows))
    texts = list(dict.fromkeys(r["method"] for r in rows))
    for row in rows:
        i, j = texts.index(row["method"]), networks.index(row["network"])
        axes.plot(
            row["measured_ms"], row["predicted_ms"], linestyle="", markersize=7,
            marker="osD^v<>P*X"[j % 10], color=colormaps["tab20"](i % 20),
        )  # fmt: skip
    ends = [f(r[k] for r in rows for k in ("measured_ms", "predicted_ms")) for f in (min, max)]
    axes.plot(ends, ends, color="black", linewidth=1)
    axes.fill_between(
        ends, [e * (1 - TARGET) for e in ends], [e * (1 + TARGET) for e in ends], color="#eeeeee"
    )
    for i, text in enumerate(texts):
        axes.plot(
            [],
            [],
            linestyle="",
            marker="o",
            color=colormaps["tab20"](i % 20),
            label=textwrap.shorten(text, 34, placeholder=" ..."),
        )
    for j, n in enumerate(networks):
        label = f"{n.rate}, {n.workers} workers"
        axes.plot([], [], linestyle="", marker="osD^v<>P*X"[j % 10], color="gray", label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_aspect("equal")
    axes.set_xlabel("measured, ms a step on average")
    axes.set_ylabel("predicted")
    axes.set_title(f"round trips of {networks[0].latency_ms:g} ms; the band is 20 %")
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--measured", type=Path, nargs="+", required=True, help="reports of step_time.py --json")
    add("--plot", help="PNG file for a picture")
    args = parser.parse_args(argv)
    try:
        arguments.check_files(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables; returns the exit code."""
    args = parse(argv)
    read = [json.loads(path.read_text(encoding="utf-8")) for path in args.measured]
    reports = [run for report in read for run in report.get("runs", [report])]
    if any(NONE not in r["methods"] or r["model"] != reports[0]["model"] for r in reports):
        print("the reports must be of one model, each with the method `none`", file=sys.stderr)
        return 1
    model = model_of(reports)
    rows = check(model, reports, launch.default_threads(1))
    print(check_table(rows))
    least = min(reports, key=lambda r: r["methods"][NONE]["step_ms_mean"])
    compute = least["methods"][NONE]["step_ms_mean"] / 1e3
    for rate in dict.fromkeys(r["rate"] for r in reports):
        network = Network(2, rate, least["latency_ms"])
        texts = list(dict.fromkeys(r["method"] for r in rows))
        print(f"\nPredicted ms at {rate} and {network.latency_ms:g} ms, by the number of workers\n")
        print(prediction_table(model, texts, compute, network))
    if args.plot:
        plot(rows, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
