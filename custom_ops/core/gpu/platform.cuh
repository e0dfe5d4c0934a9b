// What the kernels are written against: CUDA itself, or the emulator of tests/gpu/emulator.h, which
// g++ includes before everything else to run the same kernels on the CPU.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_GPU_PLATFORM_CUH_
#define TF_REDSYNC_CUSTOM_OPS_CORE_GPU_PLATFORM_CUH_

#include <algorithm>
#include <climits>
#include <cstdint>

#ifndef REDSYNC_GPU_EMULATOR
#include <cuda_runtime.h>
#define REDSYNC_LAUNCH(kernel, grid, threads, stream, ...) \
  kernel<<<grid, threads, 0, stream>>>(__VA_ARGS__)
// A kernel's parameter block: read in place, also where it is indexed.
#define REDSYNC_PARAMETER const __grid_constant__
#endif

namespace redsync {
namespace gpu {

using Wide = unsigned long long;  // NOLINT: the type of 64 bits of which there are atomics

constexpr int kThreads = 256;  // Of all blocks but those that work alone on a tensor.
constexpr int kLoneThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr unsigned kAllLanes = 0xffffffffu;

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Blocks for a loop over so many items in steps of the whole grid.
inline uint32_t GridFor(int64_t items) {
  return static_cast<uint32_t>(std::clamp<int64_t>(CeilDiv(items, kThreads), 1, 1024));
}

}  // namespace gpu
}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_GPU_PLATFORM_CUH_
