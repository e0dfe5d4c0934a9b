"""Whether everything is tested, `pytest --deep`, or what a commit needs."""

import os
import sys

VARIABLE = "TF_REDSYNC_TESTS_DEEP"  # set by conftest.py, for the processes that tests start
# conftest.py imports this before it sets the variable.
DEEP = os.environ.get(VARIABLE) == "1" or "--deep" in sys.argv
