"""The device of the kernels: always the emulator, and a GPU if the machine has one."""

import os
import pathlib
import shutil

import pytest

from tests.gpu import device as d

PROBLEM = d.cuda_problem()


@pytest.fixture(scope="session", params=["emulated"] if PROBLEM else ["emulated", "cuda"])
def device(request, tmp_path_factory):
    """A device with the core's library.

    REDSYNC_GPU_LIBRARY names a prebuilt library, REDSYNC_GPU_LIBRARY_KIND its kind.
    """
    library, kind = (os.environ.get(f"REDSYNC_GPU_LIBRARY{end}") for end in ("", "_KIND"))
    if library is None:
        compiler = os.environ.get("CXX", "g++")
        if request.param == "emulated" and shutil.which(compiler) is None:
            pytest.skip(f"there is no C++ compiler {compiler!r}")
        library = d.build(request.param, tmp_path_factory.mktemp("gpu"))
    elif kind != request.param:
        pytest.skip(f"REDSYNC_GPU_LIBRARY has the kind {kind!r}")
    return {"cuda": d.Cuda, "emulated": d.Emulated}[request.param](pathlib.Path(library))
