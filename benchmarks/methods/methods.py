"""All methods on one small task: final loss, bits, computation time.

    python benchmarks/methods/methods.py --json methods.json --plot methods.png

trains a small network on handwritten digits with every method of `rs.methods.table()` and the
hyper-parameters of benchmarks/method_settings.py, with four simulated workers. It also times the
computation of an exchange of one matrix. benchmarks/README.md describes the columns.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks import arguments

COLUMNS = ("loss", "accuracy", "bits", "sent KB", "compress ms", "decompress ms", "rate")


def parse_methods(text: str | None) -> list[str]:
    """Returns the methods of a list separated by commas, all for `None`.

    Raises:
        ValueError: for an unknown or repeated name.
    """
    from benchmarks import method_settings

    known = method_settings.names()
    if text is None:
        return known
    chosen = [word.strip() for word in text.split(",")]
    if set(chosen) - set(known) or len(set(chosen)) < len(chosen):
        raise ValueError(
            f"`--methods` must be different names out of {', '.join(known)}, separated by commas. "
            f"Received: --methods={text}"
        )
    return chosen


def measure(name: str, task: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Trains with one method and times it."""
    from benchmarks import method_settings
    from benchmarks.methods import digits_training, method_time

    method = method_settings.make(name, args.threshold)
    rate = method_settings.learning_rate(method, args.learning_rate, args.vote_rate)
    row = digits_training.train(task, method, rate, args.steps)
    row |= method_time.measure(method, (args.side, args.side), args.workers, args.seconds)
    setting = method_settings.setting_of(name)
    return {
        **row,
        "learning_rate": rate,
        "config": method.get_config(),
        "reason": setting.reason if setting.on_task else None,
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures all methods; returns the report for `--json`. A failure is a row too."""
    from benchmarks.methods.digits_task import Digits

    task, rows = Digits(args.workers, args.batch, args.seed), {}
    for i, name in enumerate(args.methods):
        print(f"{i + 1:3}/{len(args.methods)} {name:<16}", end="", flush=True)
        start = time.monotonic()
        try:
            rows[name] = measure(name, task, args)
            print(f"loss {rows[name]['loss']:.4f}", end="")
        except Exception as error:  # the others continue; the exit code reports the failure
            rows[name] = {"error": f"{type(error).__name__}: {error}"}
            print(rows[name]["error"].splitlines()[0], end="")
        print(f"  ({time.monotonic() - start:.1f} s)", flush=True)
    keys = ("workers", "batch", "steps", "side", "threads", "seed")
    return {k: getattr(args, k) for k in keys} | {"elements": task.elements, "methods": rows}


def table(methods: dict[str, dict[str, Any]]) -> str:
    """Returns the lines to print, one per method."""
    lines = [f"{'method':<16}" + "".join(f"{title:>15}" for title in COLUMNS)]
    for name, row in methods.items():
        if "error" in row:
            lines.append(f"{name:<16} failed: {row['error'].splitlines()[0]}")
            continue
        cells = (
            f"{row['loss']:.4f}",
            f"{row['accuracy']:.3f}",
            f"{row['bits']:.3f}",
            f"{row['sent_bytes'] / 1e3:.2f}",
            f"{row['compress_ms']:.2f}",
            f"{row['decompress_ms']:.2f}",
            f"{row['learning_rate']:g}",
        )
        lines.append(f"{name:<16}" + "".join(f"{cell:>15}" for cell in cells))
    return "\n".join(lines)


def loss_over_bits(axis: Any) -> None:
    """Makes a plot's axes logarithmic, with plain numbers and a grid."""
    axis.set(xscale="log", yscale="log", xlabel="bits per element and step", ylabel="final loss")
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("{x:g}")
    axis.grid(True, which="both", alpha=0.25)


def plot(methods: dict[str, dict[str, Any]], path: str) -> None:
    """Plots loss over bits, and the times as bars; points have the bars' numbers."""
    from matplotlib.figure import Figure

    rows = {name: row for name, row in methods.items() if "error" not in row}
    height = max(4.5, 0.32 * len(rows))
    figure = Figure(figsize=(13, height))
    left, right = figure.subplots(1, 2)
    numbers = {name: i + 1 for i, name in enumerate(rows)}  # names would overlap
    points: dict[tuple[str, str], list[str]] = {}
    for name, row in rows.items():
        points.setdefault((f"{row['bits']:.2g}", f"{row['loss']:.2g}"), []).append(name)
    for names in points.values():
        at = rows[names[0]]["bits"], rows[names[0]]["loss"]
        if at[0] > 0:
            left.plot(*at, "o", color="C3" if "Dense" in names else "C0")
            text = ", ".join(str(numbers[name]) for name in names)
            left.annotate(text, at, xytext=(4, 4), textcoords="offset points", fontsize=8)
    loss_over_bits(left)
    left.margins(x=0.2)
    names = list(rows)[::-1]
    bars = [f"{name}  {numbers[name]}" for name in names]
    compress = [rows[n]["compress_ms"] for n in names]
    right.barh(bars, compress, label="compress", color="C0")
    rest = [rows[n]["decompress_ms"] for n in names]
    right.barh(bars, rest, left=compress, label="decompress, new state", color="C1")
    right.set(xlabel="ms for one matrix, one worker's computation")
    right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--methods", help="names separated by commas (default: all)")
    add("--workers", type=int, default=4)
    add("--steps", type=int, default=300)
    add("--batch", type=int, default=32, help="examples per worker and step")
    add("--learning_rate", type=float, default=0.2, help="of all but those that vote")
    add("--vote_rate", type=float, default=0.002, help="learning rate of votes, such as SignSGD's")
    add("--threshold", type=float, default=0.02, help="of methods with one for gradients")
    add("--side", type=int, default=1024, help="rows and columns of the matrix that is timed")
    add("--seconds", type=float, default=1.0, help="to spend on the times of a method")
    add("--threads", type=int, default=1, help="intra-op threads of TensorFlow")
    add("--seed", type=int, default=0)
    add("--json", help="file for the report")
    add("--plot", help="PNG file for a picture")
    args = parser.parse_args(argv)
    try:
        arguments.check_counts(args, ("workers", "steps", "batch", "side", "threads"))
        arguments.check_files(args)
        args.methods = parse_methods(args.methods)
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, writes; returns the exit code."""
    import tensorflow as tf

    args = parse(argv)
    tf.config.threading.set_intra_op_parallelism_threads(args.threads)
    # One op at a time: ops after a collective must not run beside those before it.
    tf.config.threading.set_inter_op_parallelism_threads(1)
    report = run(args)
    print(
        f"\n{report['elements']:,} weights, {args.workers} workers, {args.steps} steps; times of a "
        f"{args.side} x {args.side} matrix"
    )
    print(table(report["methods"]))
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        plot(report["methods"], args.plot)
    return int(any("error" in row for row in report["methods"].values()))


if __name__ == "__main__":
    sys.exit(main())
