"""Builds the native libraries in advance, which is otherwise done when they are first used.

    python -m tf_redsync.build [--cuda]

They go to the folder TF_REDSYNC_CACHE, else to tf_redsync/ in XDG_CACHE_HOME, else in ~/.cache, by
TensorFlow and compiler, and the paths are printed. The exit status is 1 if the library of the ops
cannot be built, after what the compiler said.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from tf_redsync.building import BuildError, libraries

EXAMPLES = """\
examples:
  python -m tf_redsync.build                            for this machine
  TF_REDSYNC_CACHE=/opt/tf_redsync python -m tf_redsync.build
                                                        into an image; set the variable there, too
  python -m tf_redsync.build --cuda                     with kernels for GPUs, where there is none
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds what is missing; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tf_redsync.build",
        description=(__doc__ or "").partition("\n")[0],
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--cuda",
        action="store_true",
        help="build kernels for GPUs also where TensorFlow sees no GPU; needs nvcc",
    )
    options = parser.parse_args(arguments)
    if options.cuda:
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
