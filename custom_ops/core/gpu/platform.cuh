// Platform of the kernels: CUDA, or the emulator of tests/gpu/emulator.h, which g++ includes first
// to run the same kernels on the CPU.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_GPU_PLATFORM_CUH_
#define TF_REDSYNC_CUSTOM_OPS_CORE_GPU_PLATFORM_CUH_

#include <algorithm>
#include <climits>
#include <cstdint>

#ifndef REDSYNC_GPU_EMULATOR
#include <cuda_runtime.h>
#define REDSYNC_LAUNCH(kernel, grid, threads, stream, ...) \
  kernel<<<grid, threads, 0, stream>>>(__VA_ARGS__)
#define REDSYNC_LAUNCH_TOGETHER(kernel, grid, threads, stream, ...) \
  redsync::gpu::LaunchTogether(kernel, grid, threads, stream, __VA_ARGS__)
// A kernel's parameter block, which is read in place even if it is indexed.
#define REDSYNC_PARAMETER const __grid_constant__
#endif

namespace redsync {
namespace gpu {

using Wide = unsigned long long;  // NOLINT: the type of 64 bits of which there are atomics

constexpr int kThreads = 256;  // Threads of a block, except for blocks that handle a tensor alone.
constexpr int kLoneThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr unsigned kAllLanes = 0xffffffffu;

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Returns the number of blocks of a grid-stride loop over `items`, at most `most`.
inline uint32_t GridFor(int64_t items, int64_t most = 1024) {
  return static_cast<uint32_t>(std::clamp<int64_t>(CeilDiv(items, kThreads), 1, most));
}

// Returns a number of blocks of a kernel that are always co-resident: half of the occupancy limit.
// The other half is for kernels that wait for other devices, such as collectives.
template <class Kernel>
inline uint32_t BlocksTogether(Kernel kernel) {
  int device = 0, multiprocessors = 0, blocks = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, 0);
  return static_cast<uint32_t>(std::max(multiprocessors * blocks / 2, 1));
}

#ifndef REDSYNC_GPU_EMULATOR
// Launches a kernel whose blocks wait for each other. It fails if they do not fit on the device.
template <class... Parameters>
inline void LaunchTogether(void (*kernel)(Parameters...), dim3 grid, dim3 threads,
                           cudaStream_t stream, Parameters... parameters) {
  void* addresses[] = {&parameters...};
  cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(kernel), grid, threads, addresses, 0,
                              stream);
}
#endif

}  // namespace gpu
}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_GPU_PLATFORM_CUH_
