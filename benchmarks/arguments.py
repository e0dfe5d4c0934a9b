"""Command-line arguments shared by several benchmarks."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterable
from typing import Any


def add_step_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `step/training.py`; the caller adds `--steps` and `--warmup`."""
    add = parser.add_argument
    add("--batch", type=int, help="examples per worker (default: the model's)")
    add("--density", type=float, help="of methods that have one (default: each method's own)")
    add("--bucket-bytes", type=int, help="of the exchange (default: the library's)")


def check_counts(args: argparse.Namespace, names: Iterable[str]) -> None:
    """Checks that given arguments, numbers or lists of them, are at least 1.

    Raises:
        ValueError: names the flag and its value.
    """
    for name in names:
        value: Any = getattr(args, name)
        if value is not None and min(value if isinstance(value, list) else [value]) < 1:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"`{flag}` must be at least 1. Received: {flag}={value}")


def check_positive(args: argparse.Namespace, names: Iterable[str]) -> None:
    """Checks that given numbers are finite and positive.

    Raises:
        ValueError: names the flag and its value.
    """
    for name in names:
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"`--{name}` must be finite and above 0. Received: --{name}={value:g}")


def check_files(args: argparse.Namespace) -> None:
    """Checks before the measurement that `--json` and `--plot` can be written.

    Raises:
        ValueError: names the flag and its path, or the package to install.
    """
    from tf_redsync.cli.command_line import check_output_file

    named = {name: getattr(args, name, None) for name in ("json", "plot")}
    for name, path in named.items():
        if path is not None:
            check_output_file(f"--{name}", str(path))
    if named["plot"] and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("`--plot` needs matplotlib: pip install matplotlib")
