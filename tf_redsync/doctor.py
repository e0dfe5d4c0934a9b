"""Command line: `python -m tf_redsync.doctor`. The code is in `tf_redsync.cli.doctor`."""

import sys

from tf_redsync.cli.doctor import examine, main, render

__all__ = ["examine", "main", "render"]

if __name__ == "__main__":
    sys.exit(main())
