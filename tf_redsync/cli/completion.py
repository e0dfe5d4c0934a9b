"""Prints what makes a shell complete commands and flags, made by `shtab`."""

from __future__ import annotations

import argparse

from tf_redsync.cli.command_line import Command, Parser

_SHELLS = ("bash", "zsh", "tcsh")


def _configure(parser: Parser) -> None:
    parser.add_argument("shell", choices=_SHELLS, help="for which shell")


def _run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    import shtab

    from tf_redsync.cli import main

    print(shtab.complete(main.parser(), args.shell))
    return 0


COMMAND = Command(
    "completion",
    "print the shell code that completes this command line",
    "Prints shell code that completes commands and flags.",
    (
        ("bash > ~/.local/share/bash-completion/completions/tf-redsync", "for bash"),
        ('zsh > "${fpath[1]}/_tf-redsync"', "for zsh"),
    ),
    _configure,
    _run,
)
