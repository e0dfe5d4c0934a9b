"""Step time and bytes on the wire of several exchange methods, on real worker processes.

    sudo python benchmarks/step_time.py --workers 2 --rate 1gbit --model mlp \
        --methods none,dense,redsync --json step_time.json

Workers run in network namespaces whose links have the given rate (`benchmarks/netlab.py`). The
methods take turns in several rounds, because the speed of a machine drifts; the steps of all rounds
are pooled. docs/benchmarks.md says what the columns mean.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# `benchmarks` is imported by name, also when this file is started by its path: the folder Python
# puts first on the path in that case is replaced by its parent.
if __name__ == "__main__" and not __package__:
    sys.path[0] = str(ROOT)

from benchmarks import netlab  # noqa: E402
from benchmarks.models import WORKLOADS  # noqa: E402
from benchmarks.step_worker import METHODS  # noqa: E402
from tf_redsync import launch  # noqa: E402

COLUMNS = ("median ms", "min ms", "cpu ms", "x none", "dense / x", "counted MB", "wire MB")


class MeasurementError(RuntimeError):
    """The workers of one method failed; the message holds their last lines."""


def parse_methods(text: str) -> list[str]:
    """Returns the methods of a list separated by commas; ValueError names an unknown one."""
    methods = [word.strip() for word in text.split(",") if word.strip()]
    unknown = [method for method in methods if method not in METHODS]
    if unknown or not methods or len(set(methods)) < len(methods):
        raise ValueError(
            f"`--methods` must be different names out of {', '.join(METHODS)}, separated by "
            f"commas. Received: --methods={text}"
        )
    return methods


def measure(lab: netlab.Lab, method: str, args: argparse.Namespace) -> dict[str, Any]:
    """Starts the workers of one method once and returns what worker 0 measured."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks.step_worker", "--method", method]
        for name in ("model", "workers", "steps", "warmup", "density", "batch"):
            value = getattr(args, name)
            command += [] if value is None else [f"--{name}", str(value)]
        env = {
            # The workers import this checkout, whatever the working directory is.
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "CUDA_VISIBLE_DEVICES": "-1",
            "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
        }
        if lab.interface:
            env["TF_REDSYNC_BENCH_INTERFACE"] = lab.interface
        job = launch.run(
            [*command, "--output", str(output)],
            args.workers,
            env=env,
            timeout=args.timeout,
            grace=5,
            addresses=lab.addresses,
            wrappers=lab.wrappers,
        )
        if job.exit_code:
            raise MeasurementError(f"`{method}` failed. {job.message}")
        return json.loads(output.read_text(encoding="utf-8"))


def summary(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Pools the rounds of one method."""
    times = [ms for result in rounds for ms in result["times_ms"]]
    wire = [result["wire_bytes_per_step"] for result in rounds]
    return {
        "step_ms": statistics.median(times),
        "step_ms_min": min(times),
        "bytes_per_step": rounds[-1]["bytes_per_step"],
        "wire_bytes_per_step": None if None in wire else statistics.mean(wire),
        "cpu_ms_per_step": statistics.median(result["cpu_ms_per_step"] for result in rounds),
        "round_step_ms": [statistics.median(result["times_ms"]) for result in rounds],
    }


def table(methods: dict[str, dict[str, Any]]) -> str:
    """Returns the lines to print: one method a line, times in ms, traffic in MB (10^6 bytes)."""
    none = methods.get("none", {}).get("step_ms")
    dense = methods.get("dense", {}).get("step_ms")
    lines = ["method    " + "".join(f"{title:>12}" for title in COLUMNS)]
    for name, row in methods.items():
        step, wire = row["step_ms"], row["wire_bytes_per_step"]
        cells = [
            f"{step:.1f}",
            f"{row['step_ms_min']:.1f}",
            f"{row['cpu_ms_per_step']:.1f}",
            f"{step / none:.2f}" if none else "-",
            f"{dense / step:.2f}" if dense else "-",
            f"{row['bytes_per_step'] / 1e6:.3f}",
            "-" if wire is None else f"{wire / 1e6:.3f}",
        ]
        lines.append(f"{name:<10}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures all methods in turn; returns the report that `--json` writes."""
    results: dict[str, list[dict[str, Any]]] = {method: [] for method in args.methods}
    with netlab.network(args.workers, args.rate) as lab:
        for number in range(args.rounds):
            for method in args.methods:
                print(f"round {number + 1}/{args.rounds}: {method:<9}", end="", flush=True)
                start = time.monotonic()
                result = measure(lab, method, args)
                results[method].append(result)
                median = statistics.median(result["times_ms"])
                print(f"{median:9.1f} ms a step ({time.monotonic() - start:.0f} s in all)")
    first = results[args.methods[0]][0]
    return {
        "workers": args.workers,
        "rate": args.rate,
        "model": args.model,
        "params": first["params"],
        "batch": first["batch"],
        "steps": args.steps,
        "warmup": args.warmup,
        "rounds": args.rounds,
        "density": args.density,
        "threads": int(os.environ.get("TF_NUM_INTRAOP_THREADS", 0))
        or launch.default_threads(args.workers),
        "methods": {method: summary(rounds) for method, rounds in results.items()},
    }


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Step time and bytes on the wire, per exchange method.", allow_abbrev=False
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--rate", default="1gbit", help="of each direction of each link; none: loopback, not root"
    )
    parser.add_argument("--model", choices=sorted(WORKLOADS), default="mlp")
    parser.add_argument("--methods", default="none,dense,redsync", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--steps", type=int, default=20, help="measured steps per round")
    parser.add_argument("--warmup", type=int, default=5, help="steps before, per round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batch", type=int, help="examples per worker (default: the model's)")
    parser.add_argument("--density", type=float, default=0.001, help="of redsync")
    parser.add_argument("--timeout", type=float, default=600, help="seconds per method and round")
    parser.add_argument("--json", help="file for the report")
    args = parser.parse_args(argv)
    for name in ("workers", "steps", "warmup", "rounds", "batch"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"`--{name}` must be at least 1. Received: --{name}={value}")
    try:
        args.methods = parse_methods(args.methods)
        netlab.parse_rate(args.rate)
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    args = _parse(argv)
    try:
        report = run(args)
    except (netlab.NetworkError, MeasurementError) as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    print(
        f"\n{args.model}, {report['params']:,} parameters, {args.workers} workers, "
        f"batch {report['batch']} each, rate {args.rate}"
    )
    print(table(report["methods"]))
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
