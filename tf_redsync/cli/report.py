"""Makes a page about a training that was recorded.

RUN_DIR is what was given to tf_redsync.callbacks.CompressionMetrics. The page is one HTML file that
needs no network. It can be made while the training runs. Exit codes: 0, and 2 where there is
nothing to make a page of.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tf_redsync.cli.command_line import Command, Parser
from tf_redsync.metrics import page


def _configure(parser: Parser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", help="directory with worker-0.jsonl")
    parser.add_argument(
        "--output", metavar="FILE.html", help="file to write (default: report.html in RUN_DIR)"
    )


def _run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    try:
        path = page.report(args.run_dir, args.output)
    except (OSError, page.ReportError) as error:
        parser.error(str(error))
    print(path)
    return 0


COMMAND = Command(
    "report",
    "make a page about a training that was recorded",
    __doc__ or "",
    (("runs/1", "writes runs/1/report.html"), ("runs/1 --output page.html", "another file")),
    _configure,
    _run,
    usage="[flags] RUN_DIR",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the page and prints its path; returns the exit status."""
    return COMMAND.main(argv)
