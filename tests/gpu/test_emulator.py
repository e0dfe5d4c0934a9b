"""The emulated kernels under sanitizers, the emulator itself, and whether there is a GPU."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.gpu import device as d

COMPILER = os.environ.get("CXX", "g++")
needs_compiler = pytest.mark.skipif(
    shutil.which(COMPILER) is None, reason=f"there is no C++ compiler {COMPILER!r}"
)


def test_on_a_gpu():
    """Says in one line why the tests ran in the emulator only."""
    problem = d.cuda_problem()
    if problem:
        pytest.skip(f"the kernels ran in the emulator only: {problem}")


@needs_compiler
@pytest.mark.deep  # a minute: the tests of this folder again, slower
@pytest.mark.timeout(600)
def test_sanitizers(tmp_path):
    # In a process of its own: the sanitizer must be loaded before everything else.
    runtime = subprocess.run(
        [COMPILER, "-print-file-name=libasan.so"], capture_output=True, text=True, timeout=60
    ).stdout.strip()
    if not pathlib.Path(runtime).is_absolute():
        pytest.skip(f"{COMPILER} has no address sanitizer")
    env = {
        **os.environ,
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "REDSYNC_GPU_LIBRARY": str(d.build("sanitized", tmp_path)),
        "REDSYNC_GPU_LIBRARY_KIND": "emulated",
        "CUDA_VISIBLE_DEVICES": "-1",
    }
    subset = "ties or batch or finite or fixed or decode or descend or outlier"
    subset += " or launch or bad or corrupted or fuzz or chunks or queries"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-k", f"({subset}) and not sanitizers"],
        cwd=d.ROOT, env=env, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]


PROGRAM = """
#include <cassert>
__global__ void Reverse(int* data, int way) {
  __shared__ int copy[64];
  copy[threadIdx.x] = data[threadIdx.x];
  switch (way) {
    case 0: __syncthreads(); break;
    case 1: break;  // a barrier is missing
    case 2: if (threadIdx.x < 40) __syncthreads(); break;  // not all threads come
    case 3: if (threadIdx.x < 40) __ballot_sync(~0u, true); break;
  }
  data[threadIdx.x] = copy[63 - threadIdx.x];
}
int main(int, char** argv) {
  int data[64];
  for (int i = 0; i < 64; ++i) data[i] = i;
  REDSYNC_LAUNCH(Reverse, 1, 64, nullptr, data, argv[1][0] - '0');
  for (int i = 0; i < 64; ++i) if (data[i] != 63 - i) return 3;
}
"""


@needs_compiler
def test_the_emulator_notices(tmp_path):
    (tmp_path / "a.cc").write_text(PROGRAM)
    flags = ["-std=c++17", "-include", str(d.ROOT / "tests/gpu/emulator.h")]
    sources = [str(tmp_path / "a.cc"), str(d.ROOT / d.FIBERS)]
    command = [COMPILER, *flags, *sources, "-o", str(tmp_path / "a")]
    subprocess.run(command, check=True, timeout=120)
    for way, status in enumerate((0, 3, -6, -6)):
        run = subprocess.run([tmp_path / "a", str(way)], capture_output=True, text=True, timeout=60)
        assert run.returncode == status, way
        assert status != -6 or "emulator:" in run.stderr
