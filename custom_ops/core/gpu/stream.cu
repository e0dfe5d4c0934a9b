// What callers without CUDA headers need of the run-time library.
#include <atomic>
#include <memory>

#include "custom_ops/core/gpu/c_api.h"
#include "custom_ops/core/gpu/records.cuh"

namespace redsync {
namespace gpu {
namespace {

// Of any thread: whoever reports a failure is often another one than who met it.
std::atomic<cudaError_t> last_failure{cudaSuccess};

struct Callback {
  void (*function)(void*, int);
  void* argument;
};

// Not cudaLaunchHostFunc(): that one is never called once the device has failed, and whoever waits
// for the call would hang.
void CUDART_CB CallBack(cudaStream_t, cudaError_t status, void* data) {
  const std::unique_ptr<Callback> callback(static_cast<Callback*>(data));
  callback->function(callback->argument, Result(status) == REDSYNC_GPU_OK);
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

int redsync_gpu_then(void* stream, void (*function)(void*, int), void* argument) {
  auto* callback = new Callback{function, argument};  // CallBack() deletes it.
  const cudaError_t status =
      cudaStreamAddCallback(static_cast<cudaStream_t>(stream), CallBack, callback, 0);
  if (status == cudaSuccess) return REDSYNC_GPU_OK;
  delete callback;
  return Result(status);
}

const char* redsync_gpu_last_error(void) { return cudaGetErrorString(last_failure); }
