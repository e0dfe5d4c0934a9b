"""What all commands have in common: their flags' style, their help, how they are called."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

Flag = tuple[tuple[str, ...], dict[str, Any]]


class Parser(argparse.ArgumentParser):
    """A parser whose flags are written with dashes, and may be written with underscores.

    Scripts have absl's flags, which are written with underscores: whoever starts them types both.
    """

    def __init__(self, **options: Any):
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)

    def flags(self, flags: Sequence[Flag], group: str | None = None) -> None:
        """Adds flags, and hidden ones for their second spelling.

        Args:
            flags: Names and the options of `add_argument`.
            group: Title under which the help lists them.
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
    """One command.

    Attributes:
        name: As it is typed.
        summary: A line for the list of commands.
        description: For its help.
        examples: Command lines without the program's name, and what each does.
        configure: Adds its flags.
        run: Gets what was parsed, and the parser for errors; returns the exit code.
        usage: What follows the program's name; `None`: as argparse finds.
    """

    name: str
    summary: str
    description: str
    examples: Sequence[tuple[str, str]]
    configure: Callable[[Parser], None]
    run: Callable[[argparse.Namespace, argparse.ArgumentParser], int]
    usage: str | None = None

    def options(self, prog: str) -> dict[str, Any]:
        """Returns the options of the command's parser."""
        width = max((len(line) for line, _ in self.examples), default=0)
        lines = [f"  {prog} {line:{width}}  # {what}" for line, what in self.examples]
        return {
            "prog": prog,
            "usage": f"%(prog)s {self.usage}" if self.usage else None,
            "description": self.description,
            "epilog": "examples:\n" + "\n".join(lines) if lines else None,
        }

    def main(self, argv: Sequence[str] | None, prog: str | None = None) -> int:
        """Parses a command line and runs it; returns the exit code.

        Args:
            argv: Words after the command; `None`: of this process.
            prog: How the program was called; default: as a module.
        """
        parser = Parser(**self.options(prog or f"python -m tf_redsync.{self.name}"))
        self.configure(parser)
        return self.run(parser.parse_args(argv), parser)
