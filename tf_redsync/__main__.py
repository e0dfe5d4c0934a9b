"""Entry point of `python -m tf_redsync`, the same as `tf-redsync`; see `cli/main.py`."""

import sys

from tf_redsync.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
