"""Perplexity of language models against bytes.

    python benchmarks/methods/frontier.py --task charlm --data_dir DATA --folder rows --plot p.png

trains the small transformer of `benchmarks/convergence.py` on characters with each of `CONTENDERS`,
at equal tokens, learning rate and schedule. It plots perplexity over the bytes that a worker sends:
in a step on average, and in the step with the most. A second call resumes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import arguments, convergence
from benchmarks.accuracy.standard_runs import seeds_of

LEARNING_RATE = 3e-3  # the best of 1e-3, 3e-3 and 1e-2 for dense AdamW and for DeMo
GROUPS = {
    "adamw": ["--optimizer", "adamw", "--momentum", "0.9"],
    "without_beta_1": ["--optimizer", "adamw", "--momentum", "0"],
    "sgd": ["--optimizer", "sgd", "--momentum", "0"],
}
BASELINE = "Dense"


@dataclasses.dataclass(frozen=True)
class Contender:
    """A method in the plot.

    Attributes:
        name: Points of the same name are joined.
        setting: Setting in the table.
        method: Expression of the method.
        group: The inner optimizer, one of `GROUPS`.
    """

    name: str
    setting: str
    method: str
    group: str = "adamw"


def _local(name: str, lengths: Sequence[int], rest: str = "") -> list[Contender]:
    method = name.split(",")[0]
    return [Contender(name, f"H {h}", f"{method}(steps={h}{rest})") for h in lengths]


def _outer(momentum: float) -> str:
    return f", outer=outer.Nesterov(learning_rate=0.7, momentum={momentum})"


CONTENDERS = (
    Contender(BASELINE, "", "Dense()"),
    Contender("Dense, beta_1 = 0", "", "Dense()", "without_beta_1"),
    Contender("HalfPrecision", "", "HalfPrecision()"),
    *(Contender("BlockQuantized", f"{b} bits", f"BlockQuantized(bits={b})") for b in (8, 4)),
    Contender("PowerSGD", "", "PowerSGD()"),
    Contender("ACPSGD", "", "ACPSGD()"),
    Contender("OneBitAdam", "", "OneBitAdam(dense_below=1024)"),
    Contender("RedSync, beta_1 = 0", "1%", "RedSync(density=0.01, dense_below=1024)",
              "without_beta_1"),
    Contender("CodedTopK, beta_1 = 0", "3%", "CodedTopK(density=0.03)", "without_beta_1"),
    Contender("CodedTopK, beta_1 = 0", "3%, 4 bits", "CodedTopK(density=0.03, value_bits=4)",
              "without_beta_1"),
    *_local("LocalSGD", (15, 50)),
    *_local("DiLoCo", (15, 50, 250)),
    *_local("DiLoCo, momentum 0.5", (15, 50), _outer(0.5)),
    *_local("DiLoCo, momentum 0", (50,), _outer(0.0)),
    *_local("StreamingDiLoCo", (50,)),
    *_local("StreamingDiLoCo, momentum 0.5", (50,), _outer(0.5)),
    *_local("StreamingDiLoCo, momentum 0.5, 12 late", (50,), _outer(0.5) + ", overlap=12"),
    *_local("StreamingDiLoCo, momentum 0", (50,), _outer(0.0)),
    Contender("SparseLoCo, k = 32", "H 15", "SparseLoCo(steps=15, top_k=32)"),
    *(Contender("SparseLoCo, k = 128", f"H {h}", f"SparseLoCo(steps={h}, top_k=128)")
      for h in (15, 50)),
    Contender("DeMo", "", "DeMo()", "sgd"),
)  # fmt: skip


def train(args: argparse.Namespace) -> int:
    """Trains the contenders that the folder lacks; returns the largest exit code."""
    args.folder.mkdir(parents=True, exist_ok=True)
    codes = []
    for group, flags in GROUPS.items():
        methods = [c.method for c in CONTENDERS if c.group == group]
        common = {
            "task": "charlm", "schedule": "cosine", "evaluations": 4, "steps": args.steps,
            "workers": args.workers, "seeds": args.seeds, "learning_rate": LEARNING_RATE,
            "data_dir": args.data_dir, "json": path_of(args, group),
        }  # fmt: skip
        shared = [word for name, value in common.items() for word in (f"--{name}", str(value))]
        codes.append(convergence.main([*shared, *flags, "--methods", *methods]))
    return max(codes)


def path_of(args: argparse.Namespace, group: str) -> Path:
    """Returns the path of a group's rows."""
    return args.folder / f"charlm_{args.steps}_{args.workers}_workers_{group}.json"


def rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row for each contender in the folder.

    Means are over the seeds that did not diverge, and `sd` is their standard deviation (n - 1); a
    row whose seeds all diverged has neither.
    """
    found = []
    for c in CONTENDERS:
        path = path_of(args, c.group)
        kept = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
        own = [r for r in kept if r["method"] == c.method and "metric" in r]
        diverged = sum(r["method"] == c.method and "error" in r for r in kept)
        row = {"name": c.name, "setting": c.setting, "seeds": len(own), "diverged": diverged}
        if own:
            keys = ("metric", "bits", "sent_bytes", "peak_bytes")
            row |= {k: float(np.mean([r[k] for r in own])) for k in keys}
        if len(own) > 1:
            row["sd"] = float(np.std([r["metric"] for r in own], ddof=1))
        if own or diverged:
            found.append(row)
    return found


def table(found: Sequence[dict[str, Any]]) -> str:
    """Returns a table in Markdown."""
    lines = [
        "| method | | seeds | perplexity | sd | bits | sent, KB a step | peak, KB in a step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in found:
        columns = (
            ("metric", 1.0, ".2f"), ("sd", 1.0, ".2f"), ("bits", 1.0, ".3f"),
            ("sent_bytes", 1e-3, ".1f"), ("peak_bytes", 1e-3, ".1f"),
        )  # fmt: skip
        cells = [format(r[k] * unit, form) if k in r else "-" for k, unit, form in columns]
        head = [r["name"], r["setting"], seeds_of(r["seeds"], r["diverged"])]
        lines.append(f"| {' | '.join([*head, *cells])} |")
    return "\n".join(lines)


def plot(found: Sequence[dict[str, Any]], title: str, path: str) -> None:
    """Plots perplexity, with its standard deviation, over the mean and maximum bytes of a step."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6))
    axes = figure.subplots(1, 2, sharey=True)
    found = [r for r in found if "metric" in r]
    names = list(dict.fromkeys(r["name"] for r in found))
    for axis, key, label in (
        (axes[0], "sent_bytes", "KB that a worker sends in a step, on average"),
        (axes[1], "peak_bytes", "KB in the step in which it sends the most"),
    ):
        for i, name in enumerate(names):
            own = sorted((r for r in found if r["name"] == name), key=lambda r: r[key])
            axis.errorbar(
                [r[key] / 1e3 for r in own], [r["metric"] for r in own],
                yerr=[r.get("sd", 0.0) for r in own], label=name, capsize=3, markersize=7,
                marker="osD^v<>P*Xhd"[i % 12], color=colormaps["tab20"](i % 20), linewidth=1,
            )  # fmt: skip
        for r in found:
            if r["name"] == BASELINE:
                axis.axhline(r["metric"], color="black", linestyle=":", linewidth=1)
        axis.set_xscale("log")
        axis.set_xlabel(label)
        axis.grid(alpha=0.3, which="both")
    axes[0].set_ylabel("perplexity on the test set")
    axes[1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--task", choices=("charlm",), required=True)
    add("--folder", type=Path, required=True, help="of the rows")
    add("--data_dir", type=Path, help="folder with the text; without it nothing is trained")
    add("--workers", type=int, default=4)
    add("--steps", type=int, default=1000)
    add("--seeds", type=int, default=3)
    add("--plot", help="PNG file for a picture")
    args = parser.parse_args(argv)
    try:
        arguments.check_counts(args, ("workers", "steps", "seeds"))
        arguments.check_files(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, prints, draws; returns the exit code."""
    args = parse(argv)
    code = train(args) if args.data_dir else 0
    found = rows(args)
    if not found:
        print(f"there are no rows in {args.folder}; give --data_dir to train")
        return 1
    print(table(found))
    if args.plot:
        title = f"{args.workers} workers, {args.steps} steps, means over seeds"
        plot(found, title, args.plot)
    return code
