// Exact top-k of every chunk, one block per chunk. It finds the k-th largest magnitude digit by
// digit, then takes the elements that reach it, in the order of the positions. A chunk fits a
// cache.
#include "custom_ops/core/gpu/c_api.h"
#include "custom_ops/core/gpu/digits.cuh"
#include "custom_ops/core/gpu/records.cuh"

namespace redsync {
namespace gpu {
namespace {

// Elements are words, so that the bits of NaNs and denormals are preserved.
__device__ inline int32_t MagnitudeOf(int32_t word) { return word & 0x7fffffff; }

// The k-th largest magnitude; the first `ties` elements equal to it are taken.
struct Cut {
  int32_t magnitude;
  uint32_t ties;
};

__device__ inline Cut FindCut(const int32_t* chunk, uint32_t size, uint32_t k) {
  __shared__ uint32_t bins[kBins];
  Cut cut = {0, k};
  for (int level = 0; level < kLevels; ++level) {
    const int shift = LevelShift(level), bits = LevelBits(level);
    ClearBins(bins);
    for (uint32_t i = threadIdx.x; i < size; i += kThreads) {
      const int32_t m = MagnitudeOf(chunk[i]);
      if (static_cast<int64_t>(m) >> (shift + bits) == cut.magnitude) {
        atomicAdd(&bins[m >> shift & ((1 << bits) - 1)], 1u);
      }
    }
    __syncthreads();
    const Bin bin = FindBin(bins, cut.ties);
    cut.magnitude = cut.magnitude << bits | bin.bin;
    cut.ties -= bin.above;
  }
  return cut;
}

__global__ void __launch_bounds__(kThreads) TopOfChunks(REDSYNC_PARAMETER RedsyncGpuChunks call) {
  const auto size = static_cast<uint32_t>(call.size), k = static_cast<uint32_t>(call.k);
  const int64_t chunk_index = blockIdx.x;
  const int32_t* chunk = reinterpret_cast<const int32_t*>(call.chunks) + chunk_index * size;
  int32_t* positions = call.positions + chunk_index * k;
  int32_t* values = reinterpret_cast<int32_t*>(call.values) + chunk_index * k;
  const Cut cut = FindCut(chunk, size, k);
  uint32_t above = 0, ties = 0;  // Counts before the threads' elements.
  for (uint32_t first = 0; first < size; first += kThreads) {
    const uint32_t i = first + threadIdx.x;
    const int32_t word = i < size ? chunk[i] : 0;
    const int32_t m = i < size ? MagnitudeOf(word) : -1;
    const bool is_above = m > cut.magnitude, is_tie = m == cut.magnitude;
    uint32_t total;  // Both counts in one word, since a block has fewer than 2^16 threads.
    const uint32_t before = BlockScan(is_tie ? 1u << 16 : uint32_t{is_above}, &total);
    const uint32_t ties_before = ties + (before >> 16);
    if (is_above || (is_tie && ties_before < cut.ties)) {
      const uint32_t taken = ties_before < cut.ties ? ties_before : cut.ties;
      const uint32_t place = above + (before & 0xffff) + taken;
      positions[place] = static_cast<int32_t>(i);
      values[place] = word;
    }
    above += total & 0xffff;
    ties += total >> 16;
  }
}

}  // namespace
}  // namespace gpu
}  // namespace redsync

using namespace redsync::gpu;  // NOLINT: the C interface below is this file's other half.

int redsync_gpu_chunked_top_k(const RedsyncGpuChunks* call, void* stream_pointer) {
  if (call->number < 0 || call->number > INT32_MAX || call->size < 0 || call->size > INT32_MAX ||
      call->k < 0 || call->k > call->size) {
    return REDSYNC_GPU_INVALID_ARGUMENT;
  }
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  const auto chunks = static_cast<uint32_t>(call->number);
  if (chunks > 0 && call->k > 0) REDSYNC_LAUNCH(TopOfChunks, chunks, kThreads, stream, *call);
  return LaunchStatus();
}
