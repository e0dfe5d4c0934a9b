// Operations of a block or a warp; all its threads must call them.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_GPU_BLOCK_CUH_
#define TF_REDSYNC_CUSTOM_OPS_CORE_GPU_BLOCK_CUH_

#include "custom_ops/core/gpu/platform.cuh"

namespace redsync {
namespace gpu {

__device__ inline unsigned Lane() { return threadIdx.x % 32; }
__device__ inline unsigned Warp() { return threadIdx.x / 32; }
// Returns the number of lower lanes for which a ballot was true.
__device__ inline unsigned RankIn(unsigned ballot) { return __popc(ballot & ((1u << Lane()) - 1)); }

struct Add {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct Max {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a > b ? a : b;
  }
};

// Reduces in a fixed order, so that floating-point sums are reproducible.
template <class T, class Op>
__device__ inline T WarpReduce(T value, Op op) {
  for (int distance = 16; distance > 0; distance /= 2) {
    value = op(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  return value;
}

template <class T, class Op>
__device__ inline T BlockReduce(T value, Op op) {
  __shared__ T of_warp[32];
  value = WarpReduce(value, op);
  __syncthreads();  // `of_warp` may still be read from the last call.
  if (Lane() == 0) of_warp[Warp()] = value;
  __syncthreads();
  value = of_warp[0];
  for (unsigned w = 1; w < blockDim.x / 32; ++w) value = op(value, of_warp[w]);
  return value;
}

// Returns the sum of the values of the threads before this one; `total` receives the sum of all.
template <class T>
__device__ inline T BlockScan(T value, T* total) {
  __shared__ T of_warp[32];
  T sum = value;
  for (unsigned distance = 1; distance < 32; distance *= 2) {
    const T below = __shfl_up_sync(kAllLanes, sum, distance);
    if (Lane() >= distance) sum += below;
  }
  __syncthreads();  // `of_warp` may still be read from the last call.
  if (Lane() == 31) of_warp[Warp()] = sum;
  __syncthreads();
  T before = 0;
  *total = 0;
  for (unsigned w = 0; w < blockDim.x / 32; ++w) {
    if (w < Warp()) before += of_warp[w];
    *total += of_warp[w];
  }
  return before + sum - value;
}

// A contiguous range of items.
struct Range {
  uint32_t begin, count;
};

__device__ inline Range Part(uint32_t count, uint32_t part, uint32_t parts) {
  const uint32_t begin = static_cast<uint64_t>(count) * part / parts;
  const uint32_t end = static_cast<uint64_t>(count) * (part + 1) / parts;
  return {begin, end - begin};
}

// Several counters.
template <int kCounts, class T = uint32_t>
struct Tally {
  T at[kCounts];
};

// Replaces tallies in memory by their exclusive prefix sums; returns the sum of all.
template <int kCounts, class T>
__device__ inline Tally<kCounts, T> ScanTallies(Tally<kCounts, T>* tallies, uint32_t count) {
  constexpr uint32_t kAhead = 4;  // Neighbours that a thread handles at a time.
  Tally<kCounts, T> total = {};
  for (uint32_t first = 0; first < count; first += kAhead * blockDim.x) {
    const uint32_t begin = first + kAhead * threadIdx.x;
    Tally<kCounts, T> local[kAhead];
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) {
      local[i] = begin + i < count ? tallies[begin + i] : Tally<kCounts, T>{};
    }
    for (int c = 0; c < kCounts; ++c) {
      T sum = 0, all;
#pragma unroll
      for (const Tally<kCounts, T>& tally : local) sum += tally.at[c];
      sum = total.at[c] + BlockScan(sum, &all);
      total.at[c] += all;
#pragma unroll
      for (Tally<kCounts, T>& tally : local) {
        const T value = tally.at[c];
        tally.at[c] = sum;
        sum += value;
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) {
      if (begin + i < count) tallies[begin + i] = local[i];
    }
  }
  return total;
}

// Returns whether this is the last of `blocks` blocks to call it; the last one sees the writes of
// all others. `ticket` is 0 before and after. One thread fences for its block; the barriers order
// the accesses of the other threads around the fence.
__device__ inline bool IsLastBlock(uint32_t* ticket, uint32_t blocks) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(ticket, 1u) == blocks - 1;
    if (last) {
      atomicExch(ticket, 0u);
      __threadfence();
    }
  }
  __syncthreads();
  return last;
}

// A barrier of all blocks of a launch, which must be resident together. `arrived` is 0 before the
// first barrier. It orders memory like IsLastBlock().
__device__ inline void SyncGrid(uint32_t* arrived) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    const uint32_t ticket = atomicAdd(arrived, 1u);
    const uint32_t all = (ticket / gridDim.x + 1) * gridDim.x;
    while (atomicAdd(arrived, 0u) < all) __nanosleep(64);
    __threadfence();
  }
  __syncthreads();
}

}  // namespace gpu
}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_GPU_BLOCK_CUH_
