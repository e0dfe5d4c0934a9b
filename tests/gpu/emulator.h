// Runs CUDA kernels on the CPU: the subset of the language that custom_ops/core/gpu uses.
//
//   g++ -x c++ -std=c++17 -DREDSYNC_GPU_EMULATOR -include tests/gpu/emulator.h -I. file.cu ...
//
// Blocks run one after the other, or alternate in cooperative launches, in an order that is
// shuffled for every launch. The threads of a block are fibers: each runs until it needs other
// threads (a barrier of the block, an instruction of the warp), in shuffled order as well. Code
// with a barrier that not all threads reach, or that relies on an order without a barrier, aborts
// or gives other results. Time is not emulated. Of the memory model only races are detected:
// races.cc. Denormals are flushed, as with nvcc -ftz=true.
#ifndef TF_REDSYNC_TESTS_GPU_EMULATOR_H_
#define TF_REDSYNC_TESTS_GPU_EMULATOR_H_

#include <cstdint>
#include <cstring>

#include "fibers.h"
#include "races.h"

#define __global__ static
#define __device__
#define __host__
#define __shared__ static  // One block at a time, with the last block's values, as on a GPU.
#define __launch_bounds__(...)
#define REDSYNC_PARAMETER const
#define REDSYNC_LAUNCH(kernel, grid, threads, stream, ...) \
  emulator::Launch(grid, threads, stream, [&] { kernel(__VA_ARGS__); })
#define REDSYNC_LAUNCH_TOGETHER(kernel, grid, threads, stream, ...) \
  emulator::Launch(grid, threads, stream, [&] { kernel(__VA_ARGS__); }, true)

struct float4 {
  float x, y, z, w;
};
struct uint2 {
  uint32_t x, y;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline void __syncthreads() { emulator::WaitForBlock(); }
inline void __syncwarp() { emulator::SyncWarp(); }
inline void __threadfence() { emulator::Fence(); }
inline void __nanosleep(unsigned) { emulator::WaitForOthers(); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int32_t __float_as_int(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
inline float __int_as_float(int32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
inline double __longlong_as_double(int64_t bits) {
  double x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
__attribute__((no_sanitize_thread)) inline unsigned __ballot_sync(unsigned, bool predicate) {
  const uint64_t* all = emulator::Exchange(predicate);
  unsigned ballot = 0;
  for (int lane = 0; lane < 32; ++lane) ballot |= static_cast<unsigned>(all[lane]) << lane;
  return ballot;
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return emulator::Shuffle(value, lane % 32);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulator::Shuffle(value, threadIdx.x % 32 ^ mask);
}
template <class T>
T __shfl_up_sync(unsigned, T value, unsigned distance) {
  const unsigned lane = threadIdx.x % 32;
  return emulator::Shuffle(value, lane < distance ? lane : lane - distance);
}
// Reads and writes a location atomically, and notifies the race detector if it is enabled.
template <class T, class New>
__attribute__((no_sanitize_thread, noinline)) T Atomically(T* place, New value_for) {
  emulator::TouchAtomically(place, sizeof(T), __builtin_return_address(0));
  const T old = *place;
  *place = value_for(old);
  return old;
}
template <class T>
T atomicAdd(T* place, T value) {
  return Atomically(place, [=](T old) { return old + value; });
}
template <class T>
T atomicExch(T* place, T value) {
  return Atomically(place, [=](T) { return value; });
}
template <class T>
T atomicMin(T* place, T value) {
  return Atomically(place, [=](T old) { return value < old ? value : old; });
}
template <class T>
T atomicMax(T* place, T value) {
  return Atomically(place, [=](T old) { return value > old ? value : old; });
}
template <class T>
T atomicOr(T* place, T value) {
  return Atomically(place, [=](T old) { return old | value; });
}

// The stream API: every operation completes at once.
using cudaStream_t = void*;
enum cudaError_t { cudaSuccess, cudaErrorLaunchFailure };
enum cudaMemcpyKind { cudaMemcpyDefault };
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                   cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
namespace emulator {
cudaError_t TakeError();  // The error of emulator_fail(), once.
extern int driver_version;
}  // namespace emulator
struct cudaFuncAttributes {};
inline cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13010;
  return cudaSuccess;
}
inline cudaError_t cudaDriverGetVersion(int* version) {
  *version = emulator::driver_version;
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = emulator::kMultiprocessors;
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
  *blocks = emulator::kBlocksAtOnce;
  return cudaSuccess;
}
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, void (*)()) {
  return emulator::TakeError();
}
inline cudaError_t cudaGetLastError() { return emulator::TakeError(); }
inline const char* cudaGetErrorString(cudaError_t status) {
  return status == cudaSuccess ? "no error" : "unspecified launch failure";
}

#endif  // TF_REDSYNC_TESTS_GPU_EMULATOR_H_
