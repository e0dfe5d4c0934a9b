"""Where the kernels run: always in the emulator, and on a GPU if there is one."""

import os
import pathlib
import shutil

import pytest

from tests.gpu import device as d


def _need_compiler():
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no C++ compiler {compiler!r}")


@pytest.fixture(scope="session", params=["emulated", "cuda"])
def device(request, tmp_path_factory):
    """A device with the core's library. REDSYNC_GPU_LIBRARY names one that is built already."""
    library = os.environ.get("REDSYNC_GPU_LIBRARY")
    kind = os.environ.get("REDSYNC_GPU_LIBRARY_KIND", "cuda" if library else None)
    if kind not in (None, request.param):
        pytest.skip(f"REDSYNC_GPU_LIBRARY is of the kind {kind!r}")
    if request.param == "cuda":
        problem = d.cuda_problem()
        if problem:
            pytest.skip(problem)
    elif library is None:
        _need_compiler()
    if library is None:
        target = tmp_path_factory.mktemp("gpu") / f"libredsync_gpu_{request.param}.so"
        library = d.build(target, request.param)
    kinds = {"cuda": d.Cuda, "emulated": d.Emulated}
    return kinds[request.param](pathlib.Path(library))
