"""Base of all commands: argument parser, help and entry point."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tf_redsync import requirements

Flag = tuple[tuple[str, ...], dict[str, Any]]


class Parser(argparse.ArgumentParser):
    """A parser that accepts every flag with dashes and with underscores.

    The help shows dashes. Scripts use absl flags, which have underscores, and users mix the two.
    """

    def __init__(self, **options: Any):
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)

    def flags(self, flags: Sequence[Flag], group: str | None = None) -> None:
        """Add flags, with a hidden flag for each spelling with underscores.

        Args:
            flags: Names and keyword arguments of `add_argument`.
            group: Title of the flags in the help.
        """
        to = self.add_argument_group(group) if group else self
        for names, options in flags:
            action = to.add_argument(*names, **options)
            other = [name.replace("-", "_").replace("__", "--", 1) for name in names]
            other = [name for name in other if name not in names and name.startswith("--")]
            if other:
                hidden = {**options, "dest": action.dest, "help": argparse.SUPPRESS}
                self.add_argument(*other, **{**hidden, "default": argparse.SUPPRESS})


@dataclasses.dataclass(frozen=True)
class Command:
    """One command of `tf-redsync`.

    Attributes:
        name: The command's name on the command line.
        summary: One line for the list of commands.
        description: Text of the command's help.
        examples: Pairs of arguments and a comment.
        configure: Adds the flags to a parser.
        run: Takes the parsed arguments and the parser, for errors; returns the exit code.
        usage: Usage after the program's name; `None` lets argparse generate it.
    """

    name: str
    summary: str
    description: str
    examples: Sequence[tuple[str, str]]
    configure: Callable[[Parser], None]
    run: Callable[[argparse.Namespace, argparse.ArgumentParser], int]
    usage: str | None = None

    def options(self, prog: str) -> dict[str, Any]:
        """Return the keyword arguments of the command's parser."""
        width = max((len(line) for line, _ in self.examples), default=0)
        lines = [f"  {prog} {line:{width}}  # {comment}" for line, comment in self.examples]
        return {
            "prog": prog,
            "usage": f"%(prog)s {self.usage}" if self.usage else None,
            "description": self.description,
            "epilog": "examples:\n" + "\n".join(lines) if lines else None,
        }

    def main(self, argv: Sequence[str] | None, prog: str | None = None) -> int:
        """Parse a command line and run it; return the exit code.

        Args:
            argv: Arguments after the command; `None` for those of this process.
            prog: Program name in the help; by default `python -m tf_redsync.<command>`.
        """
        parser = Parser(**self.options(prog or f"python -m tf_redsync.{self.name}"))
        self.configure(parser)
        try:
            requirements.check_backend(os.environ.get("KERAS_BACKEND") or "tensorflow")
        except ImportError as error:
            parser.error(str(error))
        return self.run(parser.parse_args(argv), parser)


def check_installation(parser: argparse.ArgumentParser) -> None:
    """End a command that needs TensorFlow with an error if its version does not fit."""
    try:
        requirements.check_tensorflow()
        requirements.check_keras()
    except ImportError as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")


def check_output_file(flag: str, path: str) -> None:
    """Check, before the work for it, that a file of the command line can probably be written.

    Raises:
        ValueError: the path is a directory, its directory does not exist, or access is denied.
    """
    file = Path(path).absolute()
    if not path or file.is_dir() or not file.parent.is_dir():
        raise ValueError(
            f"`{flag}` must be a file in an existing directory. Received: {flag}={path}"
        )
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(f"`{flag}` must be a writable file. Received: {flag}={path}")
