"""Whether everything is tested, `pytest --deep`, or what a commit needs."""

import os

VARIABLE = "TF_REDSYNC_TESTS_DEEP"  # set by conftest.py, also for the processes that tests start
DEEP = os.environ.get(VARIABLE) == "1"
