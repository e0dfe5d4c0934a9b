// Hashes of Bloom filters.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_GPU_BLOOM_CUH_
#define TF_REDSYNC_CUSTOM_OPS_CORE_GPU_BLOOM_CUH_

#include "custom_ops/core/gpu/compression_api.h"
#include "custom_ops/core/gpu/platform.cuh"

namespace redsync {
namespace gpu {

// Iterates over the bits of a position.
struct Probes {
  uint32_t at, step;
  uint64_t bits;

  __device__ Probes(uint64_t position, const int32_t* seed, int64_t words) : bits(32 * words) {
    uint64_t h = position + (uint64_t{static_cast<uint32_t>(*seed)} + 1) * 0x9E3779B97F4A7C15u;
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9u;
    h = (h ^ (h >> 27)) * 0x94D049BB133111EBu;
    h ^= h >> 31;
    at = static_cast<uint32_t>(h);
    step = static_cast<uint32_t>(h >> 32) | 1;
  }
  __device__ uint32_t Next() {
    const auto bit = static_cast<uint32_t>(at * bits >> 32);
    at += step;
    return bit;
  }
};

// Returns the words of all filters; -1 if an argument is out of range.
inline int64_t FilterWords(const RedsyncGpuFilter* tensors, int64_t count) {
  int64_t words = 0;
  for (int64_t i = 0; i < count; ++i) {
    const RedsyncGpuFilter& f = tensors[i];
    if (f.size < 0 || f.size > UINT32_MAX || f.slots < 0 || f.slots > INT32_MAX || f.words < 1 ||
        f.words >= 1 << 27 || f.hashes < 1 || f.hashes > 64) {
      return -1;
    }
    words += f.words;
  }
  return words;
}

}  // namespace gpu
}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_GPU_BLOOM_CUH_
