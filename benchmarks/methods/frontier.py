"""Loss against bits of all methods, at several settings each.

    python benchmarks/methods/frontier.py --json frontier.json --plot frontier.png

trains `digits_task.Digits` with four simulated workers, as benchmarks/methods/methods.py does, with
each contender at several densities, ranks or intervals. benchmarks/README.md describes the columns.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks import arguments
from benchmarks.methods import methods

DENSITIES = (0.001, 0.003, 0.01, 0.03, 0.1)
HIGHER = (0.003, 0.01, 0.03, 0.1)  # for changes of weights over ten steps
BASELINE = "Dense"


def contenders() -> dict[str, list[tuple[str, Any]]]:
    """Returns the settings and methods of each contender by name."""
    import tf_redsync as rs
    from benchmarks import method_settings

    def at(make: Callable[..., Any], densities: Sequence[float] = DENSITIES, **options):
        below = {"dense_below": method_settings.DENSE_BELOW, **options}
        return [(f"{d:.1%}", make(density=d, **below)) for d in densities]

    def with_defaults(name: str):
        return method_settings.make(name, threshold=0.0)

    return {
        BASELINE: [("", rs.Dense())],
        "TopK": at(rs.TopK),
        "Coded, TopK": at(lambda **options: rs.Coded(method=rs.TopK(**options))),
        "CodedTopK": at(rs.CodedTopK),
        "CodedTopK, 10 steps": at(rs.CodedTopK, HIGHER, steps=10),
        "SBC, 10 steps": at(rs.SBC, HIGHER),
        "SBC, 10 steps, biases": at(rs.SBC, HIGHER, dense_below=0),
        "LocalSGD": [(f"{n} steps", rs.LocalSGD(steps=n)) for n in (8, 16, 32)],
        "PowerSGD": [(f"rank {r}", rs.PowerSGD(rank=r)) for r in (1, 2, 4)],
        "EFSignSGD": [("", with_defaults("EFSignSGD"))],
        "Spherical": [("", with_defaults("SphericalCompression"))],
        "LGC": [(f"{method_settings.DENSITY:.1%}", with_defaults("LGC"))],
    }


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures all contenders in all settings; returns a row for each."""
    from benchmarks.methods.digits_training import train_over_seeds

    every = [(n, s, method) for n, settings in contenders().items() for s, method in settings]
    chosen = [entry for entry in every if not args.only or entry[0] in args.only]
    rows = []
    for i, (name, setting, method) in enumerate(chosen):
        start = time.monotonic()
        found = train_over_seeds(
            method, args.learning_rate, args.steps, args.seeds, args.workers, args.batch
        )
        rows.append({"name": name, "setting": setting, **found})
        took = time.monotonic() - start
        print(f"{i + 1:3}/{len(chosen)} {name} {setting}  ({took:.1f} s)", flush=True)
    return rows


def undominated(rows: Sequence[dict[str, Any]]) -> list[bool]:
    """Returns for each row whether no other row has both fewer bits and a lower loss."""
    return [
        not any(o["bits"] < row["bits"] and o["loss"] < row["loss"] for o in rows) for row in rows
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the lines to print; a star marks undominated rows."""
    lines = [
        f"{'method':<24}{'setting':>10}{'loss':>10}{'accuracy':>10}{'bits':>10}{'sent KB':>10}"
    ]
    for row, best in zip(rows, undominated(rows), strict=True):
        lines.append(
            f"{row['name']:<24}{row['setting']:>10}{row['loss']:>10.4f}{row['accuracy']:>10.3f}"
            f"{row['bits']:>10.4f}{row['sent_bytes'] / 1e3:>10.3f}{' *' if best else ''}"
        )
    return "\n".join(lines)


def plot(rows: Sequence[dict[str, Any]], path: str) -> None:
    """Plots loss over bits, one line per method."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5))
    axis = figure.subplots()
    colors = [colormaps["tab20"](i) for i in (*range(0, 20, 2), *range(1, 20, 2))]
    names = list(dict.fromkeys(row["name"] for row in rows))
    for i, name in enumerate(n for n in names if n != BASELINE):
        own = [row for row in rows if row["name"] == name]
        own.sort(key=lambda row: row["bits"])
        marker = "osD^v<>P*Xhd"[i % 12]
        width = 2.5 if name.startswith("CodedTopK") else 1.2
        axis.plot(
            [r["bits"] for r in own], [r["loss"] for r in own],
            marker=marker, linewidth=width, color=colors[i % 20], label=name,
        )  # fmt: skip
    for row in rows:
        if row["name"] == BASELINE:
            axis.axhline(row["loss"], color="black", linestyle=":", label=BASELINE)
    methods.loss_over_bits(axis)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add(
        "--task", choices=("digits", "charlm"), default="digits", help="charlm has flags of its own"
    )
    add("--only", action="append", choices=list(contenders()), help="a method; may be repeated")
    add("--workers", type=int, default=4)
    add("--steps", type=int, default=300)
    add("--batch", type=int, default=32, help="examples per worker and step")
    add("--seeds", type=int, default=3, help="number of seeds to average over")
    add("--learning_rate", type=float, default=0.2)
    add("--json", help="file for the rows")
    add("--plot", help="PNG file for a picture")
    args = parser.parse_args(argv)
    try:
        arguments.check_counts(args, ("workers", "steps", "batch", "seeds"))
        arguments.check_files(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, writes; returns the exit code."""
    asked = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    asked.add_argument("--task", default="digits")
    if asked.parse_known_args(argv)[0].task == "charlm":
        from benchmarks.methods import language_frontier

        return language_frontier.main(argv)
    args = parse(argv)
    rows = run(args)
    print(f"\n{args.workers} workers, {args.steps} steps, {args.seeds} seeds")
    print(table(rows))
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        plot(rows, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
