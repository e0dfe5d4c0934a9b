"""Peak memory of training steps, per exchange method, on real worker processes.

    python benchmarks/step/memory.py --methods none,dense,redsync,redsync_m0 --json memory.json

Bytes are those of TensorFlow's own allocator, which counts every tensor exactly; the process's
resident memory is a check. benchmarks/README.md describes the columns.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks import arguments, netlab, workers
from benchmarks.models import WORKLOADS
from benchmarks.step import step_methods

COLUMNS = ("state", "kept", "peak", "- none", "- dense", "process", "- dense")
# Freed tensors return to the system at once, so resident memory is that of live tensors. By default
# glibc keeps freed memory.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 17), "MALLOC_ARENA_MAX": "2"}


def measure(method: str, args: argparse.Namespace) -> dict[str, Any]:
    """Runs the workers of one method; returns worker 0's measurements in bytes."""
    names = ("model", "steps", "warmup", "density", "batch", "bucket_bytes")
    flags = {"method": method, **{name: getattr(args, name) for name in names}}
    with netlab.network(args.workers, "none") as lab:
        result = workers.measure(
            "benchmarks.step.memory_worker", lab, flags, args.timeout, env=ENVIRONMENT
        )
    if result["skipped"]:
        raise workers.MeasurementError(
            f"`{method}` skipped {result['skipped']} steps that were not finite."
        )
    return result


def in_params(result: dict[str, Any]) -> dict[str, float]:
    """Returns a worker's bytes in units of the parameters' bytes.

    Returns:
        `state`: variables besides the parameters; `kept`: all tensors between two steps; `peak`:
        peak of all tensors; `process`: peak resident memory, less that before the model.
    """
    known, unit = result["known"], result["known"]["params"]
    process = result["process_peak"] - result["process_base"]
    return {
        "state": (known["slots"] + known["exchange"]) / unit,
        "kept": (result["rest"] - known["data"]) / unit,
        "peak": (result["peak"] - known["data"]) / unit,
        "process": process / unit,
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures all methods; returns the report for `--json`. A failure is a row too."""
    rows: dict[str, dict[str, Any]] = {}
    for i, method in enumerate(args.methods):
        print(f"{i + 1:3}/{len(args.methods)} {method:<16}", end="", flush=True)
        try:
            result = measure(method, args)
            rows[method] = {**in_params(result), "bytes": result}
            print(f"peak {rows[method]['peak']:.3f}", flush=True)
        # the others continue; the exit code reports the failure
        except workers.MeasurementError as error:
            rows[method] = {"error": workers.reason_of(str(error))}
            print(f"failed: {rows[method]['error']}", flush=True)
            print(f"\n{error}", file=sys.stderr)
    keys = ("model", "workers", "steps", "warmup", "density", "batch", "bucket_bytes")
    return {**{key: getattr(args, key) for key in keys}, "methods": rows}


def table(methods: dict[str, dict[str, Any]]) -> str:
    """Returns the lines to print: one method per line, in units of the parameters' bytes."""
    width = max(10, *(len(name) + 1 for name in methods))
    lines = [f"{'method':<{width}}" + "".join(f"{title:>10}" for title in COLUMNS)]
    none, dense = methods.get("none", {}), methods.get("dense", {})
    for name, row in methods.items():
        if "error" in row:
            lines.append(f"{name:<{width}}  failed: {row['error']}")
            continue
        cells = [f"{row[key]:.3f}" for key in ("state", "kept", "peak")]
        for key, other in (("peak", none), ("peak", dense), ("process", dense)):
            cells += [f"{row[key]:.3f}"] if key == "process" else []
            cells.append(f"{row[key] - other[key]:+.3f}" if key in other else "-")
        lines.append(f"{name:<{width}}" + "".join(f"{cell:>10}" for cell in cells))
    return "\n".join(lines)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--methods", default="none,dense,rs_dense,redsync,redsync_m0", help="names, or all")
    add("--model", choices=sorted(WORKLOADS), default="mlp")
    add("--workers", type=int, default=2)
    add("--steps", type=int, default=10, help="steps whose peak is measured")
    add("--warmup", type=int, default=5, help="steps before")
    arguments.add_step_flags(parser)
    add("--timeout", type=float, default=600, help="seconds per method")
    add("--json", help="file for the report")
    args = parser.parse_args(argv)
    try:
        arguments.check_counts(args, ("workers", "steps", "warmup", "batch", "bucket_bytes"))
        arguments.check_positive(args, ["timeout"])
        arguments.check_files(args)
        args.methods = step_methods.parse(args.methods)
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    args = _parse(argv)
    report = run(args)
    print(f"\n{args.model}, {args.workers} workers, in units of the parameters' bytes")
    print(table(report["methods"]))
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return int(any("error" in row for row in report["methods"].values()))


if __name__ == "__main__":
    sys.exit(main())
