// Runs of ascending indices, and their intersections with a span of the output.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_GPU_RUNS_CUH_
#define TF_REDSYNC_CUSTOM_OPS_CORE_GPU_RUNS_CUH_

#include "custom_ops/core/gpu/block.cuh"

namespace redsync {
namespace gpu {

constexpr int64_t kSpan = 8192;   // Elements of the output that a block owns.
constexpr int kRunsAtOnce = 128;  // A thread finds one bound of one run.

struct Run {
  const uint32_t* indices;
  uint32_t begin, end;  // Entries [begin, end), whose indices ascend.
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

struct Entry {
  uint32_t index;
  float value;
};

// Fills bounds[0 .. runs) in shared memory, at most kRunsAtOnce, with the intersections of
// run_of(0), .. with [begin, end). All threads must call it and may read the bounds afterwards. A
// barrier is necessary between this reading and the next call.
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

// Returns the run of entry number `i`; ends[r] is the number of entries of the runs up to r.
__device__ inline int RunOf(const uint32_t* ends, int runs, uint32_t i) {
  int low = 0, high = runs - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (ends[middle] <= i) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Calls apply(entry) for the entries within the bounds, run by run. The entries of a run, whose
// indices are distinct, are applied in any order. load(run, i) reads an entry. Entries of many runs
// are read at once, because each run may have only a few in the span.
template <class Load, class Apply>
__device__ inline void ForEntries(const Bounds* bounds, int runs, Load load, Apply apply) {
  constexpr uint32_t kAhead = 4;  // Entries that a thread reads at once.
  __shared__ uint32_t ends[kRunsAtOnce];
  const auto run = static_cast<int>(threadIdx.x);
  uint32_t all;
  uint32_t entries_up_to = run < runs ? bounds[run].end - bounds[run].begin : 0;
  entries_up_to += BlockScan(entries_up_to, &all);
  if (run < runs) ends[run] = entries_up_to;
  __syncthreads();
  for (uint32_t first = 0; first < all; first += kAhead * kThreads) {
    int run_of_entry[kAhead];
    Entry entries[kAhead];
#pragma unroll
    for (uint32_t j = 0; j < kAhead; ++j) {
      const uint32_t i = first + j * kThreads + threadIdx.x;
      run_of_entry[j] = -1;
      if (i >= all) continue;
      run_of_entry[j] = RunOf(ends, runs, i);
      entries[j] = load(run_of_entry[j], bounds[run_of_entry[j]].end - (ends[run_of_entry[j]] - i));
    }
    const uint32_t left = all - first;
    const uint32_t last = first + (left < kAhead * kThreads ? left : kAhead * kThreads) - 1;
    const int end = RunOf(ends, runs, last);
    for (int r = RunOf(ends, runs, first); r <= end; ++r) {
      if (r > 0 && ends[r] == ends[r - 1]) continue;
#pragma unroll
      for (uint32_t j = 0; j < kAhead; ++j) {
        if (run_of_entry[j] == r) apply(entries[j]);
      }
      __syncthreads();
    }
  }
}

}  // namespace gpu
}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_GPU_RUNS_CUH_
