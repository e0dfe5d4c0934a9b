"""Race detector: it reports unordered accesses, kernels have none, and need every barrier."""

import subprocess

import pytest

from tests.gpu import device as d
from tests.gpu import mutants
from tests.gpu.test_emulator import needs_compiler

DEAR = [pytest.param(kernels, marks=pytest.mark.deep) for kernels in ("chunks", "merge")]
PROGRAM = """
// Each block writes a row, and the last block to finish sums all rows.
__global__ void Sum(int* data, int* rows, unsigned* ticket, int way) {
  __shared__ int copy[64];
  __shared__ int unwritten[64];
  __shared__ bool last;
  const unsigned i = threadIdx.x, lane = i % 32;
  copy[i] = data[i];
  if (way != 1) __syncthreads();
  int x = copy[63 - i];
  if (way == 0) unwritten[i] = 0;
  if (way == 2) x += unwritten[i];
  __syncthreads();
  copy[i] = x;
  if (way == 3) __ballot_sync(~0u, true); else __syncwarp();
  x = copy[i - lane + 31 - lane];
  if (way == 4) __syncwarp();
  if (way == 4) copy[i / 32 * 32] = x;  // all lanes write
  rows[blockIdx.x * 64 + i] = x;
  if (way == 5) data[i] = x;  // all blocks write
  if (way == 6) data[64]++; else if (way == 7 && i < 32) atomicAdd(&data[64], 1);
  if (way == 7 && i >= 32) data[65] = data[64];
  if (way != 8) __threadfence();
  if (way != 9) __syncthreads();
  if (i == 0) {
    if (way == 10) last = (*ticket)++ == gridDim.x - 1;
    else last = atomicAdd(ticket, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last) return;
  if (way != 11) __threadfence();
  int sum = 0;
  for (unsigned b = 0; b < gridDim.x; ++b) sum += rows[b * 64 + i];
  data[i] = sum;
}
int main(int, char** argv) {
  int* data = new int[66]();
  for (int i = 0; i < 64; ++i) data[i] = i;
  int way = 0;
  for (const char* c = argv[1]; *c; ++c) way = 10 * way + *c - '0';
  int* rows = new int[5 * 64];
  unsigned* ticket = new unsigned[1]();
  REDSYNC_LAUNCH(Sum, 5, 64, nullptr, data, rows, ticket, way);
  // Swapped twice, and summed over five blocks.
  for (int i = 0; i < 64; ++i) {
    if (data[i] != 5 * (63 - (i / 32 * 32 + 31 - i % 32))) return 3;
  }
  return 0;
}
"""
UNWRITTEN = "shared memory is read that this block has not written"
# The expected message, by variant.
FAULTS = {
    1: UNWRITTEN,  # a missing barrier
    2: UNWRITTEN,
    3: "a race",  # a ballot instead of __syncwarp()
    4: "a race",  # two lanes write
    5: "a race",  # two blocks write
    6: "a race",
    7: "a race",  # an atomic and a plain access
    8: "a race",  # no fence before the ticket
    9: "a race",  # nor one of the other threads
    10: "a race",  # a ticket that is not atomic
    11: "a race",  # the last block has no fence
}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    source = tmp_path_factory.mktemp("races") / "a.cu"
    source.write_text(PROGRAM)
    return d.build_with_hooks([str(source)], shared=False)


@needs_compiler
@pytest.mark.parametrize("way", [0, *FAULTS])
def test_detector_reports_faults(program, way):
    run = subprocess.run([program, str(way)], capture_output=True, text=True, timeout=60)
    if way == 0:
        assert run.returncode == 0 and not run.stderr, run.stderr
    else:
        assert f"emulator: {FAULTS[way]}\n" in run.stderr, (run.returncode, run.stderr)
        assert "thread" in run.stderr.splitlines()[1]


@needs_compiler
@pytest.mark.parametrize("tests", [*DEAR, "checksum", "golomb", "bloom", "bits"])
def test_kernel_has_no_race(tests, tmp_path):
    assert mutants.run(d.build("races", tmp_path), tests) == ""


@needs_compiler
@pytest.mark.deep  # minutes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tests", ["topk", "decode", "quantize", "select"])
def test_slow_kernel_has_no_race(tests, tmp_path):
    assert mutants.run(d.build("races", tmp_path), tests) == ""


@needs_compiler
@pytest.mark.deep  # half a minute each
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mutant", mutants.mutants(), ids=lambda m: m.name)
def test_every_synchronization_is_needed(mutant):
    assert mutants.detect(mutant).startswith(mutants.FOUND)
