// What the threads of a block, or of a warp, do together. All of them must call.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_GPU_BLOCK_CUH_
#define TF_REDSYNC_CUSTOM_OPS_CORE_GPU_BLOCK_CUH_

#include "custom_ops/core/gpu/platform.cuh"

namespace redsync {
namespace gpu {

__device__ inline unsigned Lane() { return threadIdx.x % 32; }
__device__ inline unsigned Warp() { return threadIdx.x / 32; }
// Number of lanes below this one for which a ballot was true.
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

// Always in the same order, so that floating-point sums are reproducible.
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

// Sum of the values of the threads before this one; `total` gets the sum of all.
__device__ inline uint32_t BlockScan(uint32_t value, uint32_t* total) {
  __shared__ uint32_t of_warp[32];
  uint32_t sum = value;
  for (unsigned distance = 1; distance < 32; distance *= 2) {
    const uint32_t below = __shfl_up_sync(kAllLanes, sum, distance);
    if (Lane() >= distance) sum += below;
  }
  __syncthreads();  // `of_warp` may still be read from the last call.
  if (Lane() == 31) of_warp[Warp()] = sum;
  __syncthreads();
  uint32_t before = 0;
  *total = 0;
  for (unsigned w = 0; w < blockDim.x / 32; ++w) {
    if (w < Warp()) before += of_warp[w];
    *total += of_warp[w];
  }
  return before + sum - value;
}

// Whether this is the last of `blocks` blocks to come here: it sees what all the others have
// written. `ticket` is 0 before and after.
__device__ inline bool IsLastBlock(uint32_t* ticket, uint32_t blocks) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(ticket, 1u) == blocks - 1;
    if (last) *ticket = 0;
  }
  __syncthreads();
  if (last) __threadfence();
  return last;
}

// Radix selection: 31 bits of a magnitude, some at every level, from the top.
constexpr int kBins = 2048;
constexpr int kLevels = 3;
__device__ inline int LevelShift(int level) { return 20 - 10 * level; }
__device__ inline int LevelBits(int level) { return level == 0 ? 11 : 10; }

// The bin that holds the element of some rank (1 is the largest).
struct Bin {
  bool found;      // Whether there are so many elements.
  int32_t bin;     // 0 if not found.
  uint32_t above;  // Elements in higher bins.
  uint32_t count;  // Elements in this bin.
};

__device__ inline Bin FindBin(const uint32_t* bins, uint32_t rank) {
  __shared__ Bin found;
  const int strip = kBins / blockDim.x;  // A thread's bins; the first thread has the highest.
  const int highest = kBins - 1 - static_cast<int>(threadIdx.x) * strip;
  uint32_t mine = 0, total;
  for (int i = 0; i < strip; ++i) mine += bins[highest - i];
  uint32_t above = BlockScan(mine, &total);
  if (threadIdx.x == 0 && total < rank) found = {false, 0, total, 0};
  if (above < rank && rank <= above + mine) {
    int bin = highest;
    while (above + bins[bin] < rank) above += bins[bin--];
    found = {true, bin, above, bins[bin]};
  }
  __syncthreads();
  const Bin result = found;
  __syncthreads();  // Before the next call writes `found`.
  return result;
}

}  // namespace gpu
}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_GPU_BLOCK_CUH_
