"""Prints the versions of this package and of what it works with."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform

from tf_redsync.cli.command_line import Command, Parser
from tf_redsync.version import __version__

PACKAGES = ("tensorflow", "tensorflow-cpu", "keras", "tf_keras", "tensorflow-addons", "numpy")


def versions() -> dict[str, str | None]:
    """Versions of Python, this package and its neighbours; None for what is not installed."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "tf_redsync": __version__,
    }
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _configure(parser: Parser) -> None:
    del parser


def _run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    del args, parser
    for name, version in versions().items():
        if version is not None:
            print(f"{name:18}{version}")
    return 0


COMMAND = Command(
    "version",
    "print the versions of tf_redsync, TensorFlow and Keras",
    "Prints the versions of tf_redsync and of what it works with, of what is installed.",
    (("", "for a bug report, tf-redsync doctor says more"),),
    _configure,
    _run,
)
