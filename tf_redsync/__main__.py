"""Command line: `python -m tf_redsync`, which is `tf-redsync`. The code is in `cli/main.py`."""

import sys

from tf_redsync.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
