"""The emulated kernels under sanitizers, the emulator itself, and a notice without a GPU."""

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
    """Skips with the reason why the tests ran only in the emulator."""
    problem = d.cuda_problem()
    if problem:
        pytest.skip(f"the kernels ran in the emulator only: {problem}")


@needs_compiler
@pytest.mark.deep  # a minute: the tests of this folder again, slower
@pytest.mark.timeout(600)
def test_sanitizers(tmp_path):
    # In a separate process: the sanitizer must be loaded first.
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
    subset += " or launch or bad or corrupted or fuzz or chunks or queries or bits or rice"
    left_out = "sanitizers or instructions"  # nvcc does not run with that library
    chosen = f"({subset}) and not ({left_out})"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-k", chosen],
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
    case 2: if (threadIdx.x < 40) __syncthreads(); break;  // some threads never arrive
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
def test_emulator_detects_faults(tmp_path):
    (tmp_path / "a.cc").write_text(PROGRAM)
    flags = ["-std=c++17", "-include", str(d.ROOT / "tests/gpu/emulator.h")]
    sources = [str(tmp_path / "a.cc"), str(d.ROOT / d.FIBERS)]
    command = [COMPILER, *flags, *sources, "-o", str(tmp_path / "a")]
    subprocess.run(command, check=True, timeout=120)
    for way, status in enumerate((0, 3, -6, -6)):
        run = subprocess.run([tmp_path / "a", str(way)], capture_output=True, text=True, timeout=60)
        assert run.returncode == status, way
        assert status != -6 or "emulator:" in run.stderr


TOGETHER = """
#include "custom_ops/core/gpu/block.cuh"
// Each block writes a word, then reads its neighbor's after a barrier, several times.
__global__ void Turns(int* words, int* wrong, uint32_t* arrived, int way) {
  __shared__ int before;
  for (int round = 1; round <= 3; ++round) {
    if (threadIdx.x == 0) before = words[blockIdx.x] = 100 * round + blockIdx.x;
    if (way == 1 && round == 2 && blockIdx.x == 0) {
      __syncthreads();
    } else {
      redsync::gpu::SyncGrid(arrived);
    }
    const unsigned next = (blockIdx.x + 1) % gridDim.x;
    if (threadIdx.x == 40 && words[next] != 100 * round + static_cast<int>(next)) ++*wrong;
    if (before != 100 * round + static_cast<int>(blockIdx.x)) ++*wrong;  // shared memory is its own
    redsync::gpu::SyncGrid(arrived);
  }
}
int main(int, char** argv) {
  const int way = argv[1][0] - '0';
  const unsigned blocks = way == 2 ? 7 : 5;
  int words[7], wrong = 0;
  uint32_t arrived = 0;
  if (way == 3) {
    REDSYNC_LAUNCH(Turns, blocks, 64, nullptr, words, &wrong, &arrived, way);
  } else {
    REDSYNC_LAUNCH_TOGETHER(Turns, blocks, 64, nullptr, words, &wrong, &arrived, way);
  }
  return wrong == 0 && arrived == 6 * blocks ? 0 : 3;
}
"""
# Expected message of each launch.
MESSAGES = {
    0: None,
    1: "blocks wait for each other",  # and one block never arrives
    2: "more blocks are launched together than fit",
    3: "a block waits for others that are not launched together with it",
}


@needs_compiler
def test_blocks_that_wait_for_each_other(tmp_path):
    (tmp_path / "a.cu").write_text(TOGETHER)
    program = d.build_with_hooks([str(tmp_path / "a.cu")], shared=False)
    for way, message in MESSAGES.items():
        run = subprocess.run([program, str(way)], capture_output=True, text=True, timeout=60)
        if message is None:
            assert (run.returncode, run.stderr) == (0, "")
        else:
            assert f"emulator: {message}" in run.stderr, (way, run.stderr)
