"""Injects failures into real worker processes.

    python -m tests.chaos --list
    python -m tests.chaos kill_all full_disk     only these scenarios
    python -m tests.chaos --deep                 all: about 50 minutes
    python -m tests.chaos --deep --log FILE      writes results to FILE; skips passed scenarios
    python -m tests.chaos --table FILE           prints the results in FILE as a Markdown table

Without arguments it runs a scenario of several failures in a minute or two. Each wait has a timeout
of some minutes, after which all processes are killed.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import random
import re
import sys
import tempfile
import time
import traceback
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from tests.chaos import cables, environment_scenarios, hosts, processes, restarts, together  # noqa: E402, F401, they fill the table
from tests.chaos.bench import SCENARIOS, Bench, Outcome, Scenario  # noqa: E402

SHORT = ("bad_day",)


def run_scenario(scenario: Scenario, bench: Bench) -> dict:
    """Runs a scenario; returns its log entry."""
    began = time.monotonic()
    note = {"name": scenario.name, "date": datetime.date.today().isoformat()}
    try:
        outcome = scenario.run(bench)
        note |= {"passed": True, **without_paths(dataclasses.asdict(outcome))}
    except Exception as error:
        note |= {"passed": False, **dataclasses.asdict(Outcome(first_line(error)))}
        traceback.print_exc()
    return note | {"took": round(time.monotonic() - began, 1)}


def without_paths(values: dict) -> dict:
    """Replaces the path of the temporary folder in texts."""
    return {
        name: re.sub(r"/\S*?/run\b", "DIRECTORY", value) if isinstance(value, str) else value
        for name, value in values.items()
    }


def first_line(error: Exception) -> str:
    """The first line of an unexpected outcome, without the workers' output."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def table(notes: list[dict]) -> str:
    """The results as a Markdown table, in the order of the scenarios."""
    by_name = {note["name"]: note for note in notes}
    lines = [
        "| failure | what happened | found after | found by, message | what was lost |",
        "|---|---|---|---|---|",
    ]
    for name, scenario in SCENARIOS.items():
        note = by_name.get(name)
        if note is None:
            cells = [scenario.failure, "not played", "", "", ""]
        else:
            failed = "" if note["passed"] else "**NOT AS IT MUST BE:** "
            found = "" if note["found"] is None else f"{note['found']:.1f} s"
            cells = [
                scenario.failure, failed + note["happened"], found, note["by"], note["lost"]
            ]  # fmt: skip
        lines.append(
            "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in cells) + " |"
        )
    return "\n".join(lines)


def read(log: Path | None) -> list[dict]:
    """The entries of a log."""
    if log is None or not log.exists():
        return []
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


def play(names: list[str], seed: int, log: Path | None) -> list[dict]:
    """Runs scenarios one after the other and prints progress."""
    notes = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(seed, Path(folder))
        for number, name in enumerate(names):
            scenario = SCENARIOS[name]
            left = sum(SCENARIOS[n].seconds for n in names[number:])
            print(f"[{number + 1}/{len(names)}, {left / 60:.1f} min left] {name}", flush=True)
            reason = scenario.missing()
            if reason:
                print(f"    not played: {reason}", flush=True)
                continue
            note = run_scenario(scenario, bench)
            notes.append(note)
            print(f"    {json.dumps(note, indent=1)}", flush=True)
            if log is not None:
                with log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(note) + "\n")
    return notes


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__.splitlines()[0]
    )
    parser.add_argument("names", nargs="*", help="scenarios")
    parser.add_argument("--deep", action="store_true", help="all of them")
    parser.add_argument(
        "--list", action="store_true", help="what there is, and what must come of it"
    )
    parser.add_argument("--log", type=Path, help="where results are kept")
    parser.add_argument("--table", type=Path, metavar="LOG", help="print a log as a table")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of all chance")
    arguments = parser.parse_args()
    if arguments.list:
        for one in SCENARIOS.values():
            print(f"{one.name} ({one.seconds:.0f} s)\n    {one.failure}:\n    {one.expected}")
        return 0
    if arguments.table:
        print(table(read(arguments.table)))
        return 0
    unknown = [name for name in arguments.names if name not in SCENARIOS]
    if unknown:
        parser.error(f"no such scenarios: {', '.join(unknown)}; see --list")
    names = arguments.names or list(SCENARIOS if arguments.deep else SHORT)
    done = {note["name"] for note in read(arguments.log) if note["passed"]}
    print(f"seed {arguments.seed}", flush=True)
    notes = play([name for name in names if name not in done], arguments.seed, arguments.log)
    print(table(notes))
    return int(not all(note["passed"] for note in notes))


if __name__ == "__main__":
    sys.exit(main())
