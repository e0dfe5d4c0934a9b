"""Parts of a training step's time, and the communication that computation hides.

    sudo python benchmarks/step/timeline.py --method redsync --model mlp --rate 1gbit \
        --trace trace.json --plot timeline.png

trains on real worker processes, records some steps of worker 0 with TensorFlow's profiler, and
sorts the ops by purpose. benchmarks/README.md describes lanes and numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks import arguments, method_expressions, netlab, workers
from benchmarks.models import WORKLOADS
from benchmarks.step import anatomy, step_methods, timeline_view
from benchmarks.step.trace_events import Event


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs the workers; returns the recording of worker 0."""
    names = ("method", "model", "steps", "warmup", "density", "batch", "bucket_bytes")
    flags = {name: getattr(args, name) for name in names}
    with netlab.network(args.workers, args.rate) as lab:
        return workers.measure("benchmarks.step.timeline_worker", lab, flags, args.timeout)


def recording_of(result: dict[str, Any]) -> timeline_view.Recording:
    """Returns a worker's result as a `Recording`."""
    events = {name: [Event(*values) for values in result[name]] for name in ("steps", "ops")}
    rest = {name: result[name] for name in ("scope", "roles", "requests", "model")}
    return timeline_view.Recording(**events, **rest)


def summary(recording: timeline_view.Recording, plain_ms: list[float]) -> dict[str, Any]:
    """Returns the parts of the median step and of all, and the step time without the profiler."""
    parts = [anatomy.parts(s, recording.lanes(s)) for s in recording.steps]
    typical = parts[recording.steps.index(recording.typical())]
    return {"typical": typical, "steps": parts, "plain_ms": statistics.median(plain_ms)}


def table(summary: dict[str, Any]) -> str:
    """Returns the lines to print: the median step, and the median of all recorded ones."""
    typical = summary["typical"]
    median = {k: statistics.median(s[k] for s in summary["steps"]) for k in typical}
    rows = [(name, name) for name in (*anatomy.COMPUTE, "other")]
    rows += [
        ("any of these", "computing"),
        ("waiting for collectives only", "exposed"),
        ("nothing", "idle"),
        ("sum of these three: the step", "wall"),
        ("collectives under way", "collectives"),
        ("of that beside computing", "hidden"),
    ]
    lines = [f"{'ms':<30}{'typical step':>14}{'median':>10}"]
    lines += [f"{text:<30}{typical[name]:14.1f}{median[name]:10.1f}" for text, name in rows]
    if typical["collectives"]:
        share = typical["hidden"] / typical["collectives"]
        lines.append(f"hidden: {share:.0%} of the collectives' time in the typical step")
    lines.append(f"a step without the profiler: {summary['plain_ms']:.1f} ms (median)")
    return "\n".join(lines)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add(
        "--method",
        default="redsync",
        help="one of those of benchmarks/step/step_time.py, or an expression",
    )
    add("--model", choices=sorted(WORKLOADS), default="mlp")
    add("--workers", type=int, default=2)
    add("--rate", default="1gbit", help="of each direction of each link; none: loopback, not root")
    add("--steps", type=int, default=5, help="steps to record")
    add("--warmup", type=int, default=5, help="steps before")
    arguments.add_step_flags(parser)
    add("--timeout", type=float, default=600, help="seconds until the workers are killed")
    add("--trace", help="JSON file for chrome://tracing or ui.perfetto.dev")
    add("--plot", help="PNG file for a picture of the typical step")
    add("--json", help="file for the numbers")
    args = parser.parse_args(argv)
    try:
        arguments.check_counts(args, ("workers", "steps", "warmup", "batch", "bucket_bytes"))
        arguments.check_positive(args, ["timeout"])
        arguments.check_files(args)
        netlab.parse_rate(args.rate)
        chosen = [args.method]
        if "(" in args.method:
            method_expressions.exchanged(args.method)
        else:
            chosen = step_methods.parse(args.method)
    except ValueError as error:
        parser.error(str(error))
    if len(chosen) > 1:
        parser.error(f"`--method` must be one method. Received: --method={args.method}")
    args.method = chosen[0]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    args = _parse(argv)
    try:
        result = measure(args)
    except (netlab.NetworkError, workers.MeasurementError) as error:
        print(error, file=sys.stderr)
        return 1
    recording = recording_of(result)
    numbers = summary(recording, result["plain_ms"])
    rate = "loopback" if args.rate == "none" else f"{args.rate}/s"
    title = f"{args.method}, {args.model}, {args.workers} workers, {rate}"
    print(f"{title}, batch {result['batch']} each\n{table(numbers)}")
    if args.trace:
        trace = timeline_view.chrome_trace(recording, title)
        Path(args.trace).write_text(json.dumps(trace) + "\n", encoding="utf-8")
    if args.json:
        report = {**vars(args), "batch": result["batch"], **numbers}
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if args.plot:
        timeline_view.plot(recording, title, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
