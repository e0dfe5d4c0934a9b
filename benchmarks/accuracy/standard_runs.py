"""The standard runs: networks, methods, learning rates, and their order.

    python -m benchmarks.accuracy.standard_runs --folder ROWS

prints their table from the files that `benchmarks/accuracy/run_queue.py` writes.

Every arm, a method with its inner optimizer, has its own learning rate: the best of a common grid
by the metric on the test set, trained for a third of the steps with one seed and a shortened
schedule. The full runs use that rate. More workers share the same global batch and use the rates of
four.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

GRID_SEED = 0
GRID_PART = 3  # a grid run has 1 / GRID_PART of the steps

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Arm:
    """A method and its inner optimizer.

    Attributes:
        name: Name in file names and in the table.
        method: Expression of the method.
        flags: Flags of `benchmarks/convergence.py`, besides those of the setup.
    """

    name: str
    method: str
    flags: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Setup:
    """A network with its data and its training.

    Attributes:
        name: Name in file names and in the table.
        flags: Flags of `benchmarks/convergence.py`, without learning rate, length and evaluations.
        unit: Unit of `length`: `"epochs"` or `"steps"`.
        length: Length of a full run, a multiple of `GRID_PART`.
        evaluations: Evaluations of a full run, a multiple of `GRID_PART`.
        rates: The grid of learning rates.
        arms: The compared arms; the first is the dense baseline.
        core_hours: Approximate duration of a full run on one core.
        seeds: Number of seeds.
        metric: `"accuracy"`, `"BLEU"` or `"perplexity"`.
        rates_from: Name of the setup whose chosen rates it uses, instead of a grid.
        program: The module that trains it; its flags are those of `benchmarks/convergence.py`.
    """

    name: str
    flags: tuple[str, ...]
    unit: str
    length: int
    evaluations: int
    rates: tuple[float, ...]
    arms: tuple[Arm, ...]
    core_hours: float
    seeds: int = 3
    metric: str = "accuracy"
    rates_from: str | None = None
    program: str = "benchmarks.convergence"

    @property
    def sign(self) -> int:
        """1 where a larger metric is better, else -1."""
        return -1 if self.metric == "perplexity" else 1


@dataclasses.dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        setup: Its setup.
        arm: Its arm.
        rate: Its learning rate; `None` before the grid has been trained.
        seed: Seed of weights and order.
        grid: Whether it belongs to the grid.
    """

    setup: Setup
    arm: Arm
    rate: float | None
    seed: int
    grid: bool

    @property
    def name(self) -> str:
        """Name of its file, without the suffix."""
        kind = "grid" if self.grid else "full"
        rate = "tuned" if self.rate is None else f"{self.rate:g}"
        return f"{self.setup.name}-{self.arm.name}-{kind}-{rate}-seed{self.seed}"

    @property
    def core_hours(self) -> float:
        """Approximate duration on one core."""
        return self.setup.core_hours / (GRID_PART if self.grid else 1)

    def flags(self, folder: Path, data_dir: Path | None) -> list[str]:
        """Returns the command line of `benchmarks/convergence.py`."""
        part = GRID_PART if self.grid else 1
        given = {
            self.setup.unit: self.setup.length // part,
            "evaluations": self.setup.evaluations // part,
            "learning_rate": self.rate,
            "seed": self.seed,
            "json": folder / f"{self.name}.json",
            **({"data_dir": data_dir} if data_dir else {}),
        }
        words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        return [*self.setup.flags, *self.arm.flags, *words, "--methods", self.arm.method]


def row_of(run: Run, folder: Path) -> Row | None:
    """Returns the row of a run, possibly unfinished, or `None`."""
    path = folder / f"{run.name}.json"
    if run.rate is None or not path.exists():
        return None
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return rows[0] if rows else None


def done(row: Row | None) -> bool:
    """Whether a row belongs to a finished run: one with a result, or one that diverged."""
    return row is not None and ("metric" in row or "error" in row)


def grid(setup: Setup, arm: Arm) -> list[Run]:
    """Returns the runs that determine an arm's learning rate."""
    return [Run(setup, arm, rate, GRID_SEED, True) for rate in setup.rates]


def best_rate(setup: Setup, arm: Arm, folder: Path) -> float | None:
    """Returns the chosen learning rate, or `None`.

    `None` means that the grid is unfinished or that all of its runs diverged.
    """  # noqa: D205
    runs = grid(setup, arm)
    rows = [row_of(run, folder) for run in runs]
    if not all(done(row) for row in rows):
        return None
    scores = {
        run.rate: setup.sign * row["metric"]
        for run, row in zip(runs, rows, strict=True)
        if row is not None and "metric" in row
    }
    return max(scores, key=lambda rate: scores[rate]) if scores else None


def runs_of(setups: Sequence[Setup], folder: Path) -> Iterator[Run]:
    """Yields all runs in their order: for each setup the grids, then seed after seed.

    A full run of the baseline follows its grid at once. It shows whether dense training reaches the
    network's known accuracy before time is spent on the other arms.
    """
    named = {setup.name: setup for setup in setups}
    for setup in setups:
        tuned = named[setup.rates_from] if setup.rates_from else setup
        grids = [grid(setup, arm) if tuned is setup else [] for arm in setup.arms]
        rates = [best_rate(tuned, arm, folder) for arm in setup.arms]
        full = [
            Run(setup, arm, rate, seed, False)
            for seed in range(setup.seeds)
            for arm, rate in zip(setup.arms, rates, strict=True)
        ]
        yield from (*grids[0], *full[:1], *itertools.chain(*grids[1:]), *full[1:])


# --------------------------------------------------------------------------------- the setups

DENSE, HALF = Arm("dense", "Dense()"), Arm("half", "HalfPrecision()")
GMC3 = Arm("codedgmc3", "CodedGMC(density=0.03)")
GMC10 = Arm("codedgmc10", "CodedGMC(density=0.1)")
POWER = Arm("powersgd4", "PowerSGD(rank=4)")
PYTORCH = tuple(Arm(f"pytorch_{name}", name) for name in ("dense", "fp16", "powersgd"))
TOPK3 = Arm("codedtopk3", "CodedTopK(density=0.03)", ("--momentum", "0"))
TOPK3_BITS4 = Arm("codedtopk3bits4", "CodedTopK(density=0.03, value_bits=4)", ("--momentum", "0"))
CODEDADAM = Arm("codedadam", "CodedAdam()")

_IMAGES = (
    "--task", "cifar10", "--augment", "--schedule", "warm_cosine", "--weight_decay", "0.005",
)  # fmt: skip
# He's initialization is larger than the usual one for a rate of 0.1: dense training gains two
# points from 0.05 to 0.1 after four epochs.
_RESNET9_RATES, _RESNET20_RATES = (0.1, 0.2, 0.4), (0.05, 0.1, 0.2)


def _resnet9(workers: int, seeds: int, arms: tuple[Arm, ...]) -> Setup:
    batch = ("--workers", str(workers), "--batch", str(128 // workers))
    four = workers == 4
    return Setup(
        "resnet9" if four else f"resnet9_{workers}workers",
        (*_IMAGES, "--model", "resnet9", *batch),
        "epochs", 12, 12, _RESNET9_RATES, arms, 1.2, seeds, rates_from=None if four else "resnet9",
    )  # fmt: skip


SETUPS = (
    _resnet9(4, 3, (DENSE, HALF, GMC3, GMC10, POWER)),
    Setup(
        "gpt",
        ("--task", "charlm", "--model", "gpt", "--schedule", "warm_cosine", "--batch", "4"),
        "steps", 2001, 12, (3e-4, 1e-3, 3e-3), (DENSE, HALF, TOPK3, TOPK3_BITS4, CODEDADAM),
        0.5, metric="perplexity",
    ),
    Setup(
        "resnet20",
        (*_IMAGES, "--model", "resnet20", "--batch", "32"),
        "epochs", 30, 15, _RESNET20_RATES, (DENSE, HALF, GMC3), 1.6, seeds=1,
    ),
    Setup(
        "multi30k",
        ("--task", "multi30k", "--schedule", "warm_cosine"),
        "epochs", 12, 6, (3e-4, 1e-3, 3e-3), (DENSE, HALF, TOPK3, TOPK3_BITS4, CODEDADAM),
        1.4, seeds=1, metric="BLEU",
    ),
    _resnet9(8, 1, (DENSE, GMC3, GMC10, POWER)),
    _resnet9(16, 1, (DENSE, GMC3, GMC10, POWER)),
    dataclasses.replace(
        _resnet9(4, 1, PYTORCH), name="resnet9_pytorch", program="benchmarks.accuracy.pytorch"
    ),
)  # fmt: skip


# ---------------------------------------------------------------------------------- the table


def table(setups: Sequence[Setup], folder: Path) -> str:
    """Returns the results as Markdown tables: finished full runs, and the grids.

    A rate at an end of the grid is marked with "*": a better one may lie outside. "to dense" is the
    mean difference over the seeds that both have.
    """
    parts = [_table_of(setup, folder, list(runs_of(setups, folder))) for setup in setups]
    return "\n\n".join(part for part in parts if part)


def _table_of(setup: Setup, folder: Path, runs: Sequence[Run]) -> str:
    lines: list[list[str]] = []
    dense: dict[int, float] = {}
    for arm in setup.arms:
        own = [run for run in runs if run.setup is setup and run.arm is arm]
        grids = [(run.rate, row_of(run, folder)) for run in own if run.grid]
        cells = [f"{rate:g}: {_result(row)}" for rate, row in grids if row is not None]
        rows = {run.seed: row_of(run, folder) for run in own if not run.grid}
        full = {seed: row for seed, row in rows.items() if row and "metric" in row}
        diverged = sum("error" in row for row in rows.values() if row)
        if not cells and not full and not diverged:
            continue
        rate = next((run.rate for run in own if not run.grid), None)
        edge = not setup.rates_from and rate in (min(setup.rates), max(setup.rates))
        metrics = {seed: row["metric"] for seed, row in full.items()}
        dense = metrics if arm is setup.arms[0] else dense
        differences = [metrics[seed] - dense[seed] for seed in metrics if seed in dense]
        bits = [row["bits"] for row in full.values()]
        spread = np.std([*metrics.values()], ddof=1) if len(full) > 1 else None
        lines.append([
            f"`{arm.method}`{', beta_1 or momentum 0' if '--momentum' in arm.flags else ''}",
            "-" if rate is None else f"{rate:g}{'*' if edge else ''}",
            seeds_of(len(full), diverged), _mean([*metrics.values()], ".2f"),
            _text(spread, ".2f"), _mean(differences, "+.2f"), _mean(bits, ".3f"),
            "; ".join(cells) or "-",
        ])  # fmt: skip
    if not lines:
        return ""
    head = ["method", "rate", "seeds", setup.metric, "sd", "to dense", "bits", "grid"]
    rules = ["---"] * len(head)
    return "\n".join([f"**{setup.name}**", "", *("| " + " | ".join(x) + " |" for x in
                     (head, rules, *lines))])  # fmt: skip


def _result(row: Row) -> str:
    if "metric" in row:
        return f"{row['metric']:.2f}"
    return "diverged" if "error" in row else "..."


def seeds_of(count: int, diverged: int) -> str:
    """Returns the number of seeds of a mean, and the number of diverged seeds."""
    return f"{count}, {diverged} diverged" if diverged else str(count)


def _mean(values: Sequence[float], form: str) -> str:
    return _text(np.mean(values) if values else None, form)


def _text(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="Prints the table of the standard runs.")
    parser.add_argument("--folder", type=Path, required=True, help="of the rows")
    print(table(SETUPS, parser.parse_args(argv).folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
