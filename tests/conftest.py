"""Pytest settings for all tests; environment variables are set before TensorFlow is imported."""

import os
import pathlib

import pytest

from tests.deep import VARIABLE
from tests.distributed import forks
from tests.patience import PATIENCE

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
# Distributed tests run several processes on one machine; one thread each prevents oversubscription.
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")
# With the shell's TF_CONFIG, every test process would be a worker that waits for its peers.
os.environ.pop("TF_CONFIG", None)

_TESTS = pathlib.Path(__file__).parent
# Slow folders run first, so that no test process ends with a long test.
_ORDER = ("distributed", "chaos", "examples", "gpu", "conformance", "kernels", "unit")


def pytest_addoption(parser):
    """Adds `--deep`, which runs all tests."""
    parser.addoption("--deep", action="store_true", help="test everything: hours")


def pytest_configure(config):
    """Exports `--deep` to workers and to modules, which read it at import time."""
    if config.getoption("deep"):
        os.environ[VARIABLE] = "1"
    if not hasattr(config, "workerinput"):  # the controller of pytest-xdist, or the only process
        forks.keep_servers()


def pytest_collection_modifyitems(config, items):
    """Marks tests under tests/distributed and deselects tests that need `--deep`."""
    for item in items:
        if _TESTS / "distributed" in item.path.parents:
            item.add_marker(pytest.mark.distributed)
        if limit := item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(PATIENCE * limit.args[0]), append=False)
    if not config.getoption("deep"):
        left_out = [i for i in items if any(map(i.get_closest_marker, ("deep", "timing")))]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [i for i in items if i not in left_out]
    items.sort(key=lambda item: _ORDER.index(item.path.relative_to(_TESTS).parts[0]))


def pytest_collection_finish(session):
    """Excludes all objects that exist so far from garbage collection."""
    forks.freeze_garbage()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Runs all tests of a file in one pytest-xdist process, so that they share fixtures."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return nodeid.split("::")[0]

    return ByFile(config, log)
