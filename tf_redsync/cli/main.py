"""The program `tf-redsync`, also `python -m tf_redsync`, and its short commands.

The long commands (`launch`, `doctor`, `plan`, `bench`) have modules of their own. This module must
not import TensorFlow, so that help and completion are quick; commands import it when they run.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence

from tf_redsync.building import BuildError, libraries
from tf_redsync.building.once import say
from tf_redsync.cli.command_line import Command, Parser, check_installation
from tf_redsync.metrics import page
from tf_redsync.version import __version__

PROGRAM = "tf-redsync"
_EXIT_CODES = """\
exit codes:
  0 success; 1 a check or a worker failed; 2 bad arguments; 69 a host cannot be used, or too few
  came; 75 stopped on request, with a checkpoint; 124 timeout; 128 + s ended by signal s.
  A worker's own exit code becomes the launcher's. See docs/command-line.md.
"""


def _configure_report(parser: Parser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", help="directory with worker-0.jsonl")
    parser.add_argument(
        "--output", metavar="FILE.html", help="file to write (default: report.html in RUN_DIR)"
    )


def _report(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    try:
        path = page.report(args.run_dir, args.output)
    except (OSError, ValueError, page.ReportError) as error:
        parser.error(str(error))
    print(os.fspath(path).encode(errors="replace").decode())  # of a path that is not UTF-8
    return 0


REPORT = Command(
    "report",
    "write an HTML report of a recorded training",
    "Writes an HTML report of a recorded training.\n\n"
    "RUN_DIR is the directory that was passed to tf_redsync.callbacks.CompressionMetrics. The\n"
    "report is one file that loads nothing from the network. It can be written while the training\n"
    "runs. The exit code is 2 if there is nothing to report.",
    (("runs/1", "writes runs/1/report.html"), ("runs/1 --output page.html", "another file")),
    _configure_report,
    _report,
    usage="[flags] RUN_DIR",
)


def _configure_build(parser: Parser) -> None:
    parser.add_argument(
        "--cuda",
        action="store_true",
        help="build GPU kernels even if TensorFlow sees no GPU; needs nvcc",
    )


def _build(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if args.cuda:
        os.environ[libraries.CUDA] = "1"
    check_installation(parser)

    from tf_redsync.ops import native

    try:
        library = native.build(show=True)
        print(library)
        print(libraries.loopback_only())
    except (native.NativeLibraryError, BuildError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    if native.is_in_place():
        say(f"{native.LIBRARY} takes precedence; to rebuild it: {native.REBUILD}")
    if args.cuda and not libraries.has_gpu_kernels(library):
        problem = f"{library} has no GPU kernels, because nvcc is missing or failed"
        print(f"{parser.prog}: error: {problem}", file=sys.stderr)
        return 1
    return 0


BUILD = Command(
    "build",
    "build the native libraries in advance",
    "Builds the native libraries in advance. Otherwise they are built at first use.\n\n"
    "The command prints the paths of the libraries. They go to the directory TF_REDSYNC_CACHE,\n"
    "else to tf_redsync/ in XDG_CACHE_HOME, else in ~/.cache, by TensorFlow version and compiler.\n"
    "For a container image, set TF_REDSYNC_CACHE in the image, too. If the library of the ops,\n"
    "or with --cuda its GPU kernels, cannot be built, it prints the reason and returns 1.",
    (("", "for this machine"), ("--cuda", "with GPU kernels, on a machine without a GPU")),
    _configure_build,
    _build,
)


def _configure_version(parser: Parser) -> None:
    del parser


def _version(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    del args, parser
    from tf_redsync.cli import doctor

    for name, version in doctor.versions().items():
        if version is not None:
            print(f"{name:18}{version}")
    return 0


VERSION = Command(
    "version",
    "print the versions of tf_redsync, TensorFlow and Keras",
    "Prints the versions of tf_redsync and of the installed packages that it works with.",
    (("", "for a bug report, tf-redsync doctor prints more"),),
    _configure_version,
    _version,
)


def _configure_completion(parser: Parser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="the shell")


def _completion(args: argparse.Namespace, _: argparse.ArgumentParser) -> int:
    import shtab

    print(shtab.complete(parser(), args.shell))
    return 0


COMPLETION = Command(
    "completion",
    "print shell code that completes this command line",
    "Prints shell code that completes commands and flags.",
    (
        ("bash > ~/.local/share/bash-completion/completions/tf-redsync", "for bash"),
        ('zsh > "${fpath[1]}/_tf-redsync"', "for zsh"),
    ),
    _configure_completion,
    _completion,
)


def commands() -> dict[str, Command]:
    """Return the commands by name, in the order of the help."""
    long = (
        importlib.import_module(f"tf_redsync.cli.{name}").COMMAND
        for name in ("launch", "doctor", "plan", "bench", "node_rendezvous")
    )
    return {command.name: command for command in (*long, REPORT, BUILD, VERSION, COMPLETION)}


def parser() -> Parser:
    """Return the parser of the whole command line, from which completion is generated."""
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
    """Run a command; return its exit code."""
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
        whole.error(f"unknown command {words[0]!r}. {hint}Commands: {', '.join(known)}.")
    whole.parse_args(words)  # handles --help and --version
    whole.error(f"a command is missing. Commands: {', '.join(known)}.")
