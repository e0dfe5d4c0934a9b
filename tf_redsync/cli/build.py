"""Builds the native libraries in advance, which is otherwise done when they are first used.

They go to the folder TF_REDSYNC_CACHE, else to tf_redsync/ in XDG_CACHE_HOME, else in ~/.cache, by
TensorFlow and compiler, and the paths are printed. The exit status is 1 if the library of the ops
cannot be built, after what the compiler said. For an image set TF_REDSYNC_CACHE, there too.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from tf_redsync.building import BuildError, libraries
from tf_redsync.cli.command_line import Command, Parser


def _configure(parser: Parser) -> None:
    parser.add_argument(
        "--cuda",
        action="store_true",
        help="build kernels for GPUs also where TensorFlow sees no GPU; needs nvcc",
    )


def _run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if args.cuda:
        os.environ[libraries.CUDA] = "1"

    from tf_redsync.ops import native  # it imports TensorFlow

    try:
        print(native.build(show=True))
        if sys.platform == "linux":
            print(libraries.loopback_only())
    except (native.NativeLibraryError, BuildError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    return 0


COMMAND = Command(
    "build",
    "build the native libraries in advance",
    __doc__ or "",
    (("", "for this machine"), ("--cuda", "with kernels for GPUs, where there is none")),
    _configure,
    _run,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Builds what is missing; returns the exit status."""
    return COMMAND.main(argv)
