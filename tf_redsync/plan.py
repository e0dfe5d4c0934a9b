"""Command line: `python -m tf_redsync.plan`. The code is in `tf_redsync.cli.plan`."""

import sys

from tf_redsync.cli.plan import main
from tf_redsync.cli.units import bytes_per_second

__all__ = ["bytes_per_second", "main"]

if __name__ == "__main__":
    sys.exit(main())
