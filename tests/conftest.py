"""Settings for all tests; they must stand before TensorFlow is imported anywhere."""

import os
import pathlib

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
# A few processes share the machine in the distributed tests; with one thread each they do not
# starve one another.
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")
# A TF_CONFIG of the shell would turn every test process into a worker waiting for its peers.
os.environ.pop("TF_CONFIG", None)

_DISTRIBUTED = pathlib.Path(__file__).parent / "distributed"


def pytest_collection_modifyitems(items):
    """Marks everything under tests/distributed."""
    for item in items:
        if _DISTRIBUTED in item.path.parents:
            item.add_marker(pytest.mark.distributed)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With several test processes, say what stays together in one of them.

    A file, for the sake of its fixtures; and all tests that start workers, which would starve one
    another.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.split("::")[0]
            return "distributed" if file.startswith("tests/distributed/") else file

    return ByFile(config, log)
