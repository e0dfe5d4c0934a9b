"""Reproduces tables of the papers on a small machine, beside the papers' figures.

    python benchmarks/paper_tables.py sbc --json sbc.json
    python benchmarks/paper_tables.py redsync --data_dir DATA --threads 1 --json redsync.json
    sudo python benchmarks/paper_tables.py cdsgd_time --rate 1gbit --json cdsgd_time.json

benchmarks/papers/declared.py declares the tables and rows. With an existing file, only the missing
rows are measured. docs/archive/paper-tables.md shows the tables and names those that are not
comparable.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import arguments, netlab
from benchmarks.accuracy.report import Report, summaries
from benchmarks.accuracy.standard_runs import seeds_of
from benchmarks.papers.declared import TABLES, Row, Table

Cells = list[list[str]]
Found = tuple[list[str], Cells, bool]


# ------------------------------------- each kind: rows -> heads, cells, whether a row has failed


def _convergence(table: Table, args: argparse.Namespace, path: Path) -> Found:
    """Calls `benchmarks/convergence.py`; further flags replace the table's."""
    from benchmarks import convergence

    flags = [f"--{n}" if v is True else f"--{n}={v}" for n, v in table.settings.items()]
    methods = [row.method for row in table.rows]
    code = convergence.main([*flags, *args.rest, "--json", str(path), "--methods", *methods])
    if code not in (0, 1):  # invalid flags or an interrupt, already reported. 1: a row has failed
        raise SystemExit(code)
    return _accuracies(table, json.loads(path.read_text(encoding="utf-8"))["rows"])


def _digits(table: Table, args: argparse.Namespace, path: Path) -> Found:
    from benchmarks.papers import digits

    kept = Report(_settings(table, args), path)
    digits.run(table.rows, args, kept)
    return _accuracies(table, kept.rows)


def _accuracies(table: Table, rows: Sequence[dict[str, Any]]) -> Found:
    found, cells, failed = {s["method"]: s for s in summaries(rows)}, [], False
    for row in table.rows:
        own = found.get(row.key, {"error": "not measured"})
        failed |= "error" in own
        if "metric" not in own:
            cells.append([row.what, own["error"], *["-"] * 4])
            continue
        diverged = sum(r["method"] == row.key and "error" in r for r in rows)
        spread = f" ± {own['spread']:.2f}" if "spread" in own else ""
        # processes count the bytes that they send
        bits = f"{own['bits']:.4f}" if "bits" in own else "-"
        numbers = [f"{own['metric']:.2f}{spread}", f"{own['loss']:.4f}", bits]
        cells.append([row.what, *numbers, seeds_of(own["seeds"], diverged), row.paper])
    return ["", "accuracy", "loss", "bits", "seeds", "paper"], cells, failed


def _time(table: Table, args: argparse.Namespace, path: Path) -> Found:
    from benchmarks.papers import step_times
    from benchmarks.scale import traffic

    kept = Report(_settings(table, args), path)
    step_times.run(table.rows, args, kept)
    cells, failed = [], False
    for row in table.rows:
        own = step_times.summary(row, kept, table.rows[0].key)
        if "error" in own:
            failed = True
            cells.append([row.what, own["error"], *["-"] * 5])
            continue
        sent = own["bytes_per_step"]
        link = 1e3 * 8 * sent / traffic.bits_per_second(args.rate)
        numbers = (own["step_ms"], own.get("ratio", float("nan")), own["cpu_ms_per_step"], link)
        texts = [f"{n:.{d}f}" for n, d in zip(numbers, (1, 2, 1, 1), strict=True)]
        cells.append([row.what, *texts, f"{sent / 1e6:.3f}", row.paper])
    first = table.rows[0].what
    heads = ["", "median ms", f"x {first}", "cpu ms", "link ms", "counted MB", "paper"]
    return heads, cells, failed


def _dispatch(table: Table, args: argparse.Namespace, path: Path) -> Found:
    from benchmarks.papers import counted

    models = {name: counted.specs_of(name) for name in counted.MODELS}
    kept = Report({}, None)
    kept.rows = counted.dispatch(table.rows, models)
    _write(path, kept.rows)
    cells = []
    what = {row.key: row for row in table.rows}
    for found in kept.rows:
        row = what[found["method"]]
        parts = [f"{found['layers'][p]} ({found['shares'][p]:.1%})" for p in counted.PARTS]
        cells.append([f"{found['model']}, limits in {row.what}", *parts, row.paper])
    return ["", *(f"{p}: layers (weights)" for p in counted.PARTS), "limits"], cells, False


def _bytes(table: Table, args: argparse.Namespace, path: Path) -> Found:
    from benchmarks.papers import counted

    rows = counted.counted(table.rows, counted.specs_of("ResNet50"))
    _write(path, rows)
    cells = [
        [row.what, f"{found['bytes']:,.0f}", f"x{found['compression']:.0f}",
         f"x{found['formula']:.0f}", row.paper]
        for row, found in zip(table.rows, rows, strict=True)
    ]  # fmt: skip
    return ["", "bytes an exchange", "counted", "formula", "paper"], cells, False


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text(json.dumps({"rows": list(rows)}, indent=1) + "\n", encoding="utf-8")


def _settings(table: Table, args: argparse.Namespace) -> dict[str, Any]:
    """Settings that all rows of a file share; later calls may add seeds and rounds."""
    return {n: getattr(args, n) for n in table.settings if n not in ("seeds", "rounds")}


KINDS: dict[str, Callable[[Table, argparse.Namespace, Path], Found]] = {
    "convergence": _convergence,
    "digits": _digits,
    "time": _time,
    "dispatch": _dispatch,
    "bytes": _bytes,
}


# ------------------------------------------------------------------------------ the command line


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line; `args.chosen` is the table with the requested rows."""
    parser = argparse.ArgumentParser(prog="paper_tables.py", allow_abbrev=False)
    names = parser.add_subparsers(dest="table", required=True, metavar="TABLE")
    for name, table in TABLES.items():
        sub = names.add_parser(name, help=table.title, allow_abbrev=False)
        sub.add_argument(
            "--json", type=Path, help="file of rows; a call with an existing file resumes"
        )
        sub.add_argument("--rows", help="numbers of rows from 1 on, such as 1,3 (default: all)")
        if table.kind in ("digits", "time"):
            for flag, value in table.settings.items():
                sub.add_argument(f"--{flag}", type=type(value), default=value)
        if table.kind == "time":
            sub.set_defaults(density=0.001, batch=None, bucket_bytes=None)
            sub.add_argument("--timeout", type=float, default=600, help="seconds a row and round")
    args, args.rest = parser.parse_known_args(argv)
    table = TABLES[args.table]
    try:
        if args.rest and table.kind != "convergence":
            raise ValueError(f"unknown flags. Received: {' '.join(args.rest)}")
        counts = ("workers", "batch", "steps", "seeds", "rounds", "warmup")
        arguments.check_counts(args, [c for c in counts if hasattr(args, c)])
        if table.kind == "time":
            netlab.parse_rate(args.rate)
        args.chosen = dataclasses.replace(table, rows=_chosen(table.rows, args.rows))
    except ValueError as error:
        parser.error(str(error))
    return args


def _chosen(rows: Sequence[Row], text: str | None) -> tuple[Row, ...]:
    if text is None:
        return tuple(rows)
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = [0]
    if not all(1 <= n <= len(rows) for n in numbers):
        names = ", ".join(f"{i} {row.what}" for i, row in enumerate(rows, 1))
        raise ValueError(f"`--rows` must be numbers of {names}. Received: --rows={text}")
    return tuple(rows[n - 1] for n in numbers)


def markdown(heads: Sequence[str], cells: Cells) -> str:
    """Returns a table in Markdown."""
    lines = [heads, ["---"] * len(heads), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures the missing rows of a table and prints it; returns the exit code."""
    args = parse(argv)
    table = args.chosen
    with tempfile.TemporaryDirectory() as folder:
        path = args.json or Path(folder) / "rows.json"
        try:
            heads, cells, failed = KINDS[table.kind](table, args, path)
        except (ValueError, netlab.NetworkError) as error:
            print(f"paper_tables.py: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("\ninterrupted; the same command resumes" if args.json else "\ninterrupted")
            return 130
    print(f"\n{table.title}\n\n{markdown(heads, cells)}")
    print(f"\nThe paper: {table.paper}\nNot comparable: {table.not_comparable}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
