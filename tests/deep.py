"""The `--deep` switch: whether to run all tests or those of a commit."""

import os
import sys

VARIABLE = "TF_REDSYNC_TESTS_DEEP"  # set by conftest.py, inherited by worker processes
# conftest.py imports this before it sets the variable.
DEEP = os.environ.get(VARIABLE) == "1" or "--deep" in sys.argv
