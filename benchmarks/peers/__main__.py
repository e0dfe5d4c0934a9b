"""The same training step in other libraries, in one run and one table.

    sudo python -m benchmarks.peers --rate 1gbit --model mlp --workers 2 --json peers.json

PyTorch, Horovod and plain TensorFlow run in virtual environments of their own, which the first run
creates. benchmarks/README.md describes the columns.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import arguments, netlab, workers
from benchmarks.models import COMPARED
from benchmarks.peers import pytorch_ddp, report, runs
from benchmarks.step import step_methods


def parse_peers(text: str) -> list[str]:
    """Returns the names in a list separated by commas; ValueError names an unknown one."""
    names = [word.strip() for word in text.split(",") if word.strip()]
    if not names or set(names) - set(runs.PEERS) or len(set(names)) < len(names):
        raise ValueError(
            f"`--peers` must be different names out of {', '.join(runs.PEERS)}, separated by "
            f"commas. Received: --peers={text}"
        )
    return names


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description="The same training step under other libraries.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--peers", default=",".join(runs.PEERS), help="names separated by commas (default: all)")
    add("--methods", help="tf_redsync's methods, as in step_time.py (default: common ones)")
    add("--workers", type=int, default=2)
    add("--rate", default="1gbit", help="of each direction of each link; none: loopback, not root")
    add("--model", choices=COMPARED, default="mlp")
    add("--steps", type=int, default=20, help="measured steps per round")
    add("--warmup", type=int, default=5, help="steps before, per round")
    add("--rounds", type=int, default=2)
    add("--batch", type=int, help="examples per worker (default: the model's)")
    add("--timeout", type=float, default=600, help="seconds per method and round")
    venvs = str(workers.ROOT / "build" / "peers")
    add("--venvs", default=venvs, help="where environments are kept")
    add("--install", action="store_true", help="make the environments and measure nothing")
    add("--install_timeout", type=float, default=3600, help="seconds per command of an install")
    add("--json", help="file for the report")
    parser.set_defaults(bucket_bytes=None, density=None)  # for `step_time.measure` of tf_redsync
    args = parser.parse_args(argv)
    if args.warmup <= pytorch_ddp.START_POWER_SGD:
        parser.error(
            f"`--warmup` must be at least {pytorch_ddp.START_POWER_SGD + 1}: PowerSGD compresses "
            f"nothing before. Received: --warmup={args.warmup}"
        )
    try:
        arguments.check_counts(args, ("workers", "steps", "rounds", "batch"))
        arguments.check_positive(args, ["timeout"])
        arguments.check_files(args)
        args.peers = parse_peers(args.peers)
        args.methods = step_methods.parse(args.methods) if args.methods else runs.OWN_METHODS
        netlab.parse_rate(args.rate)
    except ValueError as error:
        parser.error(str(error))
    return args


def run(args: argparse.Namespace, chosen: dict[str, runs.Library | str]) -> dict[str, Any]:
    """Measures; returns the report for `--json`."""
    with netlab.network(args.workers, args.rate) as lab:
        peers = runs.rounds(lab, chosen, args.rounds)
    keys = ("workers", "rate", "model", "steps", "warmup", "rounds")
    return {
        **{key: getattr(args, key) for key in keys},
        "threads": workers.threads(args.workers),
        "peers": peers,
        "problems": report.failures(peers) + report.differences(peers),
    }


def complain(problems: Sequence[str]) -> int:
    """Prints failures; returns the exit code."""
    for problem in problems:
        print(f"\n{problem}", file=sys.stderr)
    return int(bool(problems))


def main(argv: Sequence[str] | None = None) -> int:
    """Installs, measures, prints, writes; returns the exit code."""
    args = parse(argv)
    chosen = runs.libraries(args)
    if args.install:
        missing = {name: {"error": why} for name, why in chosen.items() if isinstance(why, str)}
        return complain(report.failures(missing))
    try:
        result = run(args, chosen)
    except netlab.NetworkError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    print(f"\n{args.model}, {args.workers} workers, rate {args.rate}, {result['threads']} threads")
    print(report.table(result["peers"]))
    print(report.versions(result["peers"]))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return complain(result["problems"])


if __name__ == "__main__":
    sys.exit(main())
