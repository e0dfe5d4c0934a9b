"""Command line: `python -m tf_redsync.build`. The code is in `tf_redsync.cli.build`."""

import sys

from tf_redsync.cli.build import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
