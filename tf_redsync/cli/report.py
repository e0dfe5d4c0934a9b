"""Makes a page about a training that was recorded.

    python -m tf_redsync.report RUN_DIR

RUN_DIR is what was given to tf_redsync.callbacks.CompressionMetrics. The page is one HTML file that
needs no network. It can be made while the training runs. Exit codes: 0, and 2 where there is
nothing to make a page of.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tf_redsync.metrics import page


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m tf_redsync.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("run_dir", metavar="RUN_DIR", help="directory with worker-0.jsonl")
    made.add_argument(
        "--output", metavar="FILE.html", help="file to write (default: report.html in RUN_DIR)"
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the page and prints its path; returns the exit status."""
    made = parser()
    args = made.parse_args(argv)
    try:
        path = page.report(args.run_dir, args.output)
    except (OSError, page.ReportError) as error:
        made.error(str(error))
    print(path)
    return 0
