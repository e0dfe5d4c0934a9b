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


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items):
    """Marks everything under tests/distributed, and says what may not run side by side.

    With several test processes (`-n 2 --dist loadgroup`) a file stays in one of them, for the sake
    of its fixtures, and so do all tests that start workers, which would starve one another.
    """
    for item in items:
        group = item.path.stem
        if _DISTRIBUTED in item.path.parents:
            item.add_marker(pytest.mark.distributed)
            group = "distributed"
        item.add_marker(pytest.mark.xdist_group(group))
