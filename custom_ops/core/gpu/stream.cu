// What callers without CUDA headers need of the run-time library.
#include <memory>

#include "custom_ops/core/gpu/c_api.h"
#include "custom_ops/core/gpu/platform.cuh"

namespace {

struct Callback {
  void (*function)(void*, int);
  void* argument;
};

// Not cudaLaunchHostFunc(): that one is never called once the device has failed, and whoever waits
// for the call would hang.
void CUDART_CB CallBack(cudaStream_t, cudaError_t status, void* data) {
  const std::unique_ptr<Callback> callback(static_cast<Callback*>(data));
  callback->function(callback->argument, status == cudaSuccess);
}

int Code(cudaError_t status) {
  return status == cudaSuccess ? REDSYNC_GPU_OK : REDSYNC_GPU_CUDA_ERROR;
}

}  // namespace

int redsync_gpu_copy(void* to, const void* from, int64_t bytes, void* stream) {
  return Code(
      cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream)));
}

int redsync_gpu_then(void* stream, void (*function)(void*, int), void* argument) {
  auto callback = std::make_unique<Callback>(Callback{function, argument});
  const cudaError_t status =
      cudaStreamAddCallback(static_cast<cudaStream_t>(stream), CallBack, callback.get(), 0);
  if (status == cudaSuccess) callback.release();
  return Code(status);
}

const char* redsync_gpu_last_error(void) { return cudaGetErrorString(cudaPeekAtLastError()); }
