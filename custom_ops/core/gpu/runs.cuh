// Runs of ascending indices, and the part of each that falls into a span of the output.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_GPU_RUNS_CUH_
#define TF_REDSYNC_CUSTOM_OPS_CORE_GPU_RUNS_CUH_

#include "custom_ops/core/gpu/platform.cuh"

namespace redsync {
namespace gpu {

constexpr int64_t kSpan = 8192;   // Elements of the output that a block owns.
constexpr int kRunsAtOnce = 128;  // A thread finds one bound of one run.

struct Run {
  const uint32_t* indices;
  uint32_t begin, end;  // Ascending from the one to before the other.
};

struct Bounds {
  uint32_t begin, end;
};

__device__ inline uint32_t LowerBound(const Run& run, int64_t value) {
  uint32_t low = run.begin, high = run.end;
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    if (run.indices[middle] < value) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Fills bounds[0 .. runs) in shared memory, at most kRunsAtOnce, with the parts of run_of(0), ..
// that fall into [begin, end). All threads must call, may read the bounds afterwards, and must have
// come to a barrier after that before the next call.
template <class RunOf>
__device__ inline void FindBounds(int64_t begin, int64_t end, int runs, Bounds* bounds,
                                  RunOf run_of) {
  const int run = threadIdx.x / 2;
  if (run < runs) {
    if (threadIdx.x % 2 == 0) {
      bounds[run].begin = LowerBound(run_of(run), begin);
    } else {
      bounds[run].end = LowerBound(run_of(run), end);
    }
  }
  __syncthreads();
}

}  // namespace gpu
}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_GPU_RUNS_CUH_
