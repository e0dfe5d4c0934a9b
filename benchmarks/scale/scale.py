"""Step time of 2 to 4,096 workers, predicted from measurements of two, and checked on a few.

    sudo python benchmarks/scale/scale.py --model mlp --rate 100mbit --check 2,4,8 \
        --json scale.json --plot scale.png
    python benchmarks/scale/scale.py --calibration scale.json --rate 10gbit --latency-us 30 \
        --plot steps.png --map map.png

The first command measures in network namespaces (`benchmarks/netlab.py`): two workers for the
predictions, the others for comparison. The second one reads the measurements from a file.
`benchmarks/scale/prediction.py` has the model; benchmarks/README.md describes the columns.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks import netlab
from benchmarks.models import WORKLOADS
from benchmarks.scale import (
    measure,
    prediction,
    scale_methods,
)
from benchmarks.scale.traffic import bits_per_second, bytes_per_second

WORKERS = tuple(2**i for i in range(1, 13))
TARGET = 0.2  # accepted error of a prediction
# Pairs in which the first method is faster for few workers.
CROSSOVERS = (
    ("RedSync", "SparDL"),
    ("RedSync", "ACPSGD"),
    ("RedSync", "PowerSGD"),
    ("RedSync", "Dense"),
    ("RedSync quantized", "ACPSGD"),
)


def check(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Compares measured steps with predictions for workers that share the cores of one machine."""
    model, rate, rows = prediction.model_of(report, "limited"), report["rate"], []
    for measured in report["measured"]:
        workers, threads = measured["workers"], measured["threads"]
        cluster = prediction.Cluster(
            workers,
            bytes_per_second(bits_per_second(rate)),
            share=prediction.oversubscription(workers, threads, report["cores"]),
            burst=0.0 if rate == "none" else netlab.BURST_BYTES,
        )
        for name, row in measured["methods"].items():
            predicted = model.step_seconds(name, cluster)
            rows.append(
                {
                    "workers": workers,
                    "method": name,
                    "measured_s": row["step_s"],
                    "predicted_s": predicted,
                    "error": predicted / row["step_s"] - 1,
                    "core_measured_s": row["processor_s"],
                    "core_predicted_s": model.core_seconds(name, workers),
                }
            )
    return rows


def check_table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the comparison as Markdown."""
    lines = [
        "| method | workers | measured ms | predicted ms | error | core ms | predicted core ms |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    order = {name: i for i, name in enumerate(scale_methods.NAMES)}
    for row in sorted(rows, key=lambda r: (order[r["method"]], r["workers"])):
        missed = "" if abs(row["error"]) < TARGET else " (!)"
        lines.append(
            f"| {row['method']} | {row['workers']} | {1e3 * row['measured_s']:.1f} | "
            f"{1e3 * row['predicted_s']:.1f} | {100 * row['error']:+.0f} %{missed} | "
            f"{1e3 * row['core_measured_s']:.1f} | {1e3 * row['core_predicted_s']:.1f} |"
        )
    good = sum(abs(row["error"]) < TARGET for row in rows)
    lines.append(f"\n{good} of {len(rows)} predictions are within {100 * TARGET:.0f} %.")
    return "\n".join(lines)


def predictions(report: dict[str, Any], cluster: prediction.Cluster) -> dict[str, Any]:
    """Predicts for workers on separate machines, and finds crossovers between methods."""
    model = prediction.model_of(report)
    steps = {
        name: [model.step_seconds(name, dataclasses.replace(cluster, workers=p)) for p in WORKERS]
        for name in model.methods
    }
    crossovers = [
        {"from": a, "to": b, "workers": prediction.crossover(model, a, b, cluster)}
        for a, b in CROSSOVERS
        if a in steps and b in steps
    ]
    return {"workers": list(WORKERS), "step_s": steps, "crossovers": crossovers}


def prediction_table(predicted: dict[str, Any]) -> str:
    """Returns predicted times in ms as Markdown."""
    workers = predicted["workers"]
    lines = [
        "| method | " + " | ".join(str(p) for p in workers) + " |",
        "|---|" + "---:|" * len(workers),
    ]
    for name, steps in predicted["step_s"].items():
        lines.append(f"| {name} | " + " | ".join(f"{1e3 * s:.3g}" for s in steps) + " |")
    for row in predicted["crossovers"]:
        where = f"from {row['workers']} workers on" if row["workers"] else "nowhere"
        lines.append(f"\n{row['to']} overtakes {row['from']}: {where}")
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description="Step time of 2 to 4,096 workers, predicted and checked.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--calibration", help="file of an earlier --json: nothing is measured")
    add("--model", choices=sorted(WORKLOADS), default="mlp")
    add("--methods", help=f"of {', '.join(scale_methods.NAMES)}, separated by commas")
    add("--rate", default="100mbit", help="of each direction of each link, for both")
    add("--check", default="2", help="numbers of workers to measure, separated by commas")
    add("--latency-us", type=float, default=30.0, help="of a link, in predictions")
    add("--speed", type=float, default=1.0, help="of a worker, in cores of the measurement")
    add("--density", type=float, default=0.001)
    add("--batch", type=int, help="examples per worker (default: the model's)")
    add("--seconds", type=float, default=4.0, help="to measure each method for, 3 to 20 steps")
    add("--timeout", type=float, default=900.0, help="seconds for each number of workers")
    add("--json", help="file for the report")
    add("--plot", help="file for the picture of step times")
    add("--map", help="file for the picture of the fastest methods")
    args = parser.parse_args(argv)
    try:
        args.methods = scale_methods.parse(args.methods)
        netlab.parse_rate(args.rate)
        args.check = sorted({int(word) for word in args.check.split(",")})
        if args.check[0] < 2:
            raise ValueError(f"`--check` must be at least 2 workers. Received: {args.check[0]}")
    except ValueError as error:
        parser.error(str(error))
    for name in ("speed", "seconds", "timeout", "density"):
        if not getattr(args, name) > 0:
            parser.error(f"`--{name}` must be positive. Received: {getattr(args, name)}")
    if not args.latency_us >= 0:
        parser.error(f"`--latency-us` must not be negative. Received: {args.latency_us}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    args = parse(argv)
    if args.calibration:
        report = json.loads(Path(args.calibration).read_text(encoding="utf-8"))
    else:
        try:
            report = measure.report(args)
        except (netlab.NetworkError, measure.MeasurementError) as error:
            print(f"\n{error}", file=sys.stderr)
            return 1
        _write(report, args.json)  # saves minutes of measurements before anything can fail
    report["check"] = check(report)
    cluster = prediction.Cluster(
        2,
        bytes_per_second(bits_per_second(args.rate)),
        latency=1e-6 * args.latency_us,
        speed=args.speed,
    )
    report["predicted"] = {
        "rate": args.rate,
        "latency_us": args.latency_us,
        "speed": args.speed,
        **predictions(report, cluster),
    }
    print(f"\n{report['model']}, measured at {report['rate']}\n{check_table(report['check'])}")
    print(f"\nPredicted ms, {args.rate}, {args.latency_us:g} us, speed {args.speed:g}")
    print(prediction_table(report["predicted"]))
    _write(report, args.json)
    if args.plot or args.map:
        from benchmarks.scale import plot

        if args.plot:
            plot.steps(report, args.plot)
        if args.map:
            plot.winners(report, cluster, args.map)
    return 0


def _write(report: dict[str, Any], path: str | None) -> None:
    if path:
        Path(path).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
