// Wrappers of the CUDA runtime for callers without its headers.
#include <atomic>
#include <string>
#include <thread>

#include "custom_ops/core/gpu/c_api.h"
#include "custom_ops/core/gpu/records.cuh"

namespace redsync {
namespace gpu {
namespace {

// Shared by all threads, because another thread may report the failure.
std::atomic<cudaError_t> last_failure{cudaSuccess};

// A kernel that every device must be able to load.
__global__ void Nothing() {}

std::string Version(int number) {
  return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
}

// Returns the reason why kernels of this library do not run on a device; "" if they do.
std::string Problem(int device) {
  int runtime = 0, driver = 0;
  cudaRuntimeGetVersion(&runtime);
  cudaDriverGetVersion(&driver);
  if (driver == 0) return "there is no NVIDIA driver";
  const std::string versions = "the driver is for CUDA " + Version(driver) +
                               ", and the kernels were built with CUDA " + Version(runtime) + ": ";
  cudaError_t status = cudaSuccess;
  // In a thread of its own: restoring this thread's device would create a context there, too.
  std::thread([&] {
    cudaFuncAttributes attributes;
    status = cudaSetDevice(device);
    if (status == cudaSuccess) status = cudaFuncGetAttributes(&attributes, Nothing);
    cudaGetLastError();  // Clears the error, which the next call would report otherwise.
  }).join();
  if (status == cudaSuccess) return "";
  return versions + "GPU " + std::to_string(device) + ": " + cudaGetErrorString(status);
}

}  // namespace

int Result(cudaError_t status) {
  if (status == cudaSuccess) return REDSYNC_GPU_OK;
  last_failure = status;
  return REDSYNC_GPU_CUDA_ERROR;
}

}  // namespace gpu
}  // namespace redsync

using namespace redsync::gpu;  // NOLINT: the C interface below is this file's other half.

int redsync_gpu_copy(void* to, const void* from, int64_t bytes, void* stream) {
  return Result(
      cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream)));
}

const char* redsync_gpu_last_error(void) { return cudaGetErrorString(last_failure); }

const char* redsync_gpu_problem(int device) {
  static auto* problem = new std::string;  // Valid until the next call.
  *problem = Problem(device);
  return problem->c_str();
}
