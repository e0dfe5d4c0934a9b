"""Step time and bytes on the wire of several exchange methods, on real worker processes.

    sudo python benchmarks/step/step_time.py --workers 2 --rate 1gbit --model mlp \
        --methods none,dense,redsync --json step_time.json
    sudo python benchmarks/step/step_time.py --workers 2,4 --rate 100mbit,1gbit,10gbit,none \
        --model mlp,lstm,vgg --methods all --json wide.json --plot wide.png

Workers run in network namespaces whose links have the given rate (`benchmarks/netlab.py`). The
methods take turns in several rounds, because the speed of a machine drifts; the steps of all rounds
are pooled. benchmarks/README.md describes the columns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# `benchmarks` is imported by name, also if this file is started by its path. Python then puts this
# file's folder first on the path; its parent replaces it.
if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks import arguments, netlab, workers
from benchmarks.models import WORKLOADS
from benchmarks.step import step_methods, step_report

INTERRUPTED = 130


class Progress:
    """Prints the current measurement, and the estimated remaining time."""

    def __init__(self, total: int):
        self.total, self.done, self.start = total, 0, time.monotonic()

    def begin(self, text: str) -> None:
        """Prints the next measurement."""
        print(f"{self.done + 1:3}/{self.total} {text} ", end="", flush=True)
        self._begun = time.monotonic()

    def end(self, text: str) -> None:
        """Prints a result."""
        self.done += 1
        now = time.monotonic()
        left = (now - self.start) / self.done * (self.total - self.done)
        minutes, seconds = divmod(round(left), 60)
        rest = f"{minutes} min {seconds} s left" if self.done < self.total else "done"
        print(f"{text} ({now - self._begun:.0f} s; {rest})", flush=True)

    def leave_out(self, count: int) -> None:
        """Reduces the number of measurements after a failure, which is not repeated."""
        self.total -= count


def measure(lab: netlab.Lab, model: str, method: str, args: argparse.Namespace) -> dict[str, Any]:
    """Starts the workers of one method once and returns worker 0's measurements."""
    names = ("steps", "warmup", "density", "batch", "bucket_bytes")
    flags = {"method": method, "model": model, **{name: getattr(args, name) for name in names}}
    result = workers.measure("benchmarks.step.worker", lab, flags, args.timeout)
    if result["skipped"]:
        raise workers.MeasurementError(
            f"`{method}` skipped {result['skipped']} of {len(result['times_ms'])} steps that were "
            "not finite: they update nothing, so their times say nothing."
        )
    return result


def measure_all(
    lab: netlab.Lab, model: str, args: argparse.Namespace, progress: Progress
) -> Iterator[dict[str, Any]]:
    """Measures all methods in turn on one network; yields their report after each measurement.

    A failure is a row too.
    """
    results: dict[str, list[dict[str, Any]]] = {method: [] for method in args.methods}
    errors: dict[str, str] = {}
    width = max(map(len, args.methods))
    for number, method in itertools.product(range(args.rounds), args.methods):
        if method in errors:
            continue
        progress.begin(
            f"{model:<5}{len(lab.addresses):2} workers {lab.rate:>8}, "
            f"round {number + 1}/{args.rounds}: {method:<{width}}"
        )
        try:
            result = measure(lab, model, method, args)
        # the others continue; the exit code reports the failure
        except workers.MeasurementError as error:
            errors[method] = workers.reason_of(str(error))
            progress.leave_out(args.rounds - number - 1)
            progress.end(f"failed: {errors[method]}")
            print(f"\n{error}", file=sys.stderr)
        else:
            results[method].append(result)
            progress.end(f"{statistics.median(step_report.step_times(result)):9.1f} ms a step")
        yield _report(lab, model, args, results, errors)


def _report(
    lab: netlab.Lab,
    model: str,
    args: argparse.Namespace,
    results: dict[str, list[dict[str, Any]]],
    errors: dict[str, str],
) -> dict[str, Any]:
    """Returns the report of the rounds so far, without methods that have none."""
    first = next((rounds[0] for rounds in results.values() if rounds), {})
    rows = {
        method: {"error": errors[method]} if method in errors else step_report.summary(rounds)
        for method, rounds in results.items()
        if rounds or method in errors
    }
    keys = ("steps", "warmup", "rounds", "density", "bucket_bytes")
    return {
        "workers": len(lab.addresses),
        "rate": lab.rate,
        "latency_ms": lab.latency,
        "model": model,
        "params": first.get("params"),
        "batch": first.get("batch"),
        **{key: getattr(args, key) for key in keys},
        "threads": workers.threads(len(lab.addresses)),
        "methods": rows,
    }


def run(
    args: argparse.Namespace, save: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """Measures all combinations, one network after the other.

    Args:
        args: The command line.
        save: Called after each measurement with the reports of all combinations so far.

    Returns:
        A report for each combination.
    """
    networks = list(itertools.product(args.workers, args.rate))
    progress = Progress(len(networks) * len(args.model) * args.rounds * len(args.methods))
    reports: list[dict[str, Any]] = []
    for count, rate in networks:
        with netlab.network(count, rate, args.latency) as lab:
            for model in args.model:
                done = len(reports)
                for report in measure_all(lab, model, args, progress):
                    reports[done:] = [report]
                    save(reports)
    return reports


def parse_list(flag: str, text: str, read: Callable[[str], Any], what: str) -> list[Any]:
    """Returns the values of a list separated by commas.

    Raises:
        ValueError: for repeated values, and if `read` raises; the message asks for `what`.
    """
    words = [word.strip() for word in text.split(",")]
    try:
        values = [read(word) for word in words]
    except (KeyError, ValueError) as error:
        raise ValueError(f"`--{flag}` must be {what}. Received: --{flag}={text}") from error
    if len(set(words)) < len(words):
        raise ValueError(f"`--{flag}` must not repeat a value. Received: --{flag}={text}")
    return values


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Step time and bytes on the wire, per exchange method. --workers, --rate and "
        "--model may be lists separated by commas: all combinations are measured.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--workers", default="2")
    add("--rate", default="1gbit", help="of each direction of each link; none: loopback, not root")
    add("--latency", type=float, default=0.0, metavar="MS", help="of a round trip; needs a rate")
    add("--model", default="mlp", help=f"of {', '.join(sorted(WORKLOADS))}")
    add(
        "--methods",
        default="none,dense,redsync",
        help="names or expressions separated by commas, or all",
    )
    add("--steps", type=int, default=20, help="measured steps per round")
    add("--warmup", type=int, default=5, help="steps before, per round")
    add("--rounds", type=int, default=2)
    arguments.add_step_flags(parser)
    add("--timeout", type=float, default=600, help="seconds per method and round")
    add("--json", help="file for the report")
    add("--plot", help="PNG file for a picture; `none` must be among the methods")
    args = parser.parse_args(argv)
    try:
        args.workers = parse_list("workers", args.workers, int, "numbers of workers, like 2 or 2,4")
        what = f"of {', '.join(sorted(WORKLOADS))}"
        args.model = parse_list("model", args.model, lambda name: WORKLOADS[name].name, what)
        what = "none, or like 100mbit or 1gbit,10gbit"
        args.rate = parse_list("rate", args.rate, netlab.parse_rate, what)
        args.methods = step_methods.parse(args.methods)
        counts = ("workers", "steps", "warmup", "rounds", "batch", "bucket_bytes")
        arguments.check_counts(args, counts)
        arguments.check_positive(args, ["timeout"])
        arguments.check_files(args)
        if args.latency < 0 or (args.latency and "none" in args.rate):
            raise ValueError(
                "`--latency` must be at least 0, and needs a `--rate`. Received: "
                f"--latency={args.latency:g} --rate={','.join(args.rate)}"
            )
    except ValueError as error:
        parser.error(str(error))
    if args.plot and "none" not in args.methods:
        parser.error("`--plot` draws times in units of `none`: add it to `--methods`.")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    args = _parse(argv)
    single = len(args.workers) == len(args.rate) == len(args.model) == 1
    reports: list[dict[str, Any]] = []
    interrupted = False

    def save(found: list[dict[str, Any]]) -> None:
        reports[:] = found
        if args.json:
            text = json.dumps(reports[0] if single else {"runs": reports}, indent=2)
            Path(args.json).write_text(text + "\n", encoding="utf-8")

    try:
        run(args, save)
    except netlab.NetworkError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        interrupted = True
        print("\ninterrupted: these are the finished rounds" if reports else "\ninterrupted")
    for report in reports:
        print(f"\n{step_report.heading(report)}")
        print(step_report.table(report["methods"]))
    if interrupted:
        return INTERRUPTED
    if args.plot:
        step_report.plot(reports, args.plot)
    return int(any("error" in row for r in reports for row in r["methods"].values()))


if __name__ == "__main__":
    sys.exit(main())
