"""Settings for all tests; they must stand before TensorFlow is imported anywhere."""

import os
import pathlib

import pytest

from tests.deep import VARIABLE
from tests.distributed import forks
from tests.patience import PATIENCE

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
# A few processes share the machine in the distributed tests; with one thread each they do not
# starve one another.
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")
# A TF_CONFIG of the shell would turn every test process into a worker waiting for its peers.
os.environ.pop("TF_CONFIG", None)

_TESTS = pathlib.Path(__file__).parent
# What takes long comes first, so that no test process is left with it in the end.
_ORDER = ("distributed", "chaos", "examples", "gpu", "conformance", "kernels", "unit")


def pytest_addoption(parser):
    """The one switch: with it everything, without it what a commit needs."""
    parser.addoption("--deep", action="store_true", help="test everything: hours")


def pytest_configure(config):
    """Hands `--deep` on to the modules, which ask when they are imported, and to workers."""
    if config.getoption("deep"):
        os.environ[VARIABLE] = "1"
    if not hasattr(config, "workerinput"):  # the process that starts the others, if any
        forks.keep_servers()


def pytest_collection_modifyitems(config, items):
    """Marks everything under tests/distributed; leaves out what is for `--deep` alone."""
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
    """What is there by now is no garbage."""
    forks.freeze_garbage()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With several test processes, a file stays together in one of them, for its fixtures."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return nodeid.split("::")[0]

    return ByFile(config, log)
