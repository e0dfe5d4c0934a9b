"""The command `tf-redsync`, and `python -m tf_redsync`: finds the command that is asked for.

Nothing here imports TensorFlow: help and completion have to be quick. The commands' modules import
it when they run, if they need it.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Sequence

from tf_redsync.cli.command_line import Command, Parser
from tf_redsync.version import __version__

PROGRAM = "tf-redsync"
NAMES = ("launch", "doctor", "plan", "bench", "report", "build", "version", "completion")
_EXIT_CODES = """\
exit codes:
  0 success; 1 a check or a worker failed; 2 bad arguments; 69 a host cannot be used;
  75 stopped on request, with a checkpoint; 124 timeout; 128 + s ended by signal s.
  A worker's own exit code becomes the launcher's. See docs/command-line.md.
"""


def commands() -> dict[str, Command]:
    """Returns the commands that are there, by name."""
    found: dict[str, Command] = {}
    for name in NAMES:
        found[name] = importlib.import_module(f"tf_redsync.cli.{name}").COMMAND
    return found


def parser() -> Parser:
    """Returns the parser of the whole command line; that is what completion is made of."""
    made = Parser(
        prog=PROGRAM,
        description="Gradient compression for Keras: starts, checks and predicts trainings.",
        epilog=f"{PROGRAM} COMMAND --help has examples.\n\n{_EXIT_CODES}",
    )
    made.add_argument("--version", action="version", version=f"tf_redsync {__version__}")
    each = made.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", parser_class=Parser
    )
    for name, command in commands().items():
        options = command.options(f"{PROGRAM} {name}")
        command.configure(each.add_parser(name, help=command.summary, **options))
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    known = commands()
    if words and words[0] in known:
        return known[words[0]].main(words[1:], f"{PROGRAM} {words[0]}")
    whole = parser()
    if not words:
        whole.print_help()
        return 2
    if not words[0].startswith("-"):
        close = difflib.get_close_matches(words[0], known, 1)
        hint = f"Did you mean {close[0]}? " if close else ""
        whole.error(
            f"there is no command {words[0]!r}. {hint}The commands are: {', '.join(known)}."
        )
    whole.parse_args(words)  # --help and --version end here
    whole.error(f"a command is missing: one of {', '.join(known)}.")
