// Calls the CUDA core from TensorFlow kernels, without CUDA headers: streams, errors, events.
#ifndef TF_REDSYNC_CUSTOM_OPS_KERNELS_GPU_STREAM_H_
#define TF_REDSYNC_CUSTOM_OPS_KERNELS_GPU_STREAM_H_

#include <functional>
#include <utility>

#include "custom_ops/core/gpu/c_api.h"
#include "tensorflow/core/common_runtime/device/device_event_mgr.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/lib/core/threadpool.h"
#include "xla/stream_executor/stream.h"

namespace redsync {

// Returns the cudaStream_t on which TensorFlow runs the kernels of this device.
inline void* StreamOf(tensorflow::OpKernelContext* context) {
  return context->op_device_context()->stream()->platform_specific_handle().stream;
}

// Converts a code of the C interface to a status.
inline tensorflow::Status FromCode(int code, const char* work) {
  if (code == REDSYNC_GPU_OK) return tensorflow::OkStatus();
  const char* why = code == REDSYNC_GPU_CUDA_ERROR ? redsync_gpu_last_error() : "wrong arguments";
  return tensorflow::errors::Internal(work, " failed on the GPU with code ", code, ": ", why, ".");
}

// Calls function(scratch, bytes, stream) of the C interface with `bytes` of scratch memory, which
// may be freed once the work is queued. `bytes` is the result of a size query, which is negative if
// an argument is out of range. `work` names the work in errors.
template <class Function>
tensorflow::Status WithScratch(tensorflow::OpKernelContext* context, int64_t bytes,
                               const char* work, const Function& function) {
  if (bytes < 0) return FromCode(REDSYNC_GPU_INVALID_ARGUMENT, work);
  tensorflow::Tensor scratch;
  TF_RETURN_IF_ERROR(
      context->allocate_temp(tensorflow::DT_UINT8, tensorflow::TensorShape({bytes}), &scratch));
  return FromCode(function(scratch.data(), bytes, StreamOf(context)), work);
}

// Memory for a record on the device, and for its copy on the host.
struct RecordPair {
  tensorflow::Tensor on_device, on_host;

  tensorflow::Status Allocate(tensorflow::OpKernelContext* context) {
    const tensorflow::TensorShape shape({sizeof(RedsyncGpuRecord)});
    TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_UINT8, shape, &on_device));
    tensorflow::AllocatorAttributes pinned;
    pinned.set_on_host(true);
    pinned.set_gpu_compatible(true);
    return context->allocate_temp(tensorflow::DT_UINT8, shape, &on_host, pinned);
  }
  RedsyncGpuRecord* device() { return reinterpret_cast<RedsyncGpuRecord*>(on_device.data()); }
  const RedsyncGpuRecord& host() const {
    return *reinterpret_cast<const RedsyncGpuRecord*>(on_host.data());
  }
};

// Queues a copy of the record to the host; afterwards calls check() and done() on one of
// TensorFlow's threads. Neither a thread nor the stream waits: an event is recorded in the stream,
// and TensorFlow polls it. Like other TensorFlow code, this ends the process if the device has
// failed.
inline void CheckThenDone(tensorflow::OpKernelContext* context, RecordPair* record,
                          std::function<void()> check,
                          tensorflow::AsyncOpKernel::DoneCallback done) {
  const int copied = redsync_gpu_copy(record->on_host.data(), record->on_device.data(),
                                      sizeof(RedsyncGpuRecord), StreamOf(context));
  OP_REQUIRES_OK_ASYNC(context, FromCode(copied, "Copying the record of errors"), done);
  // Not on the poller's threads, because done() may run the next kernel.
  tensorflow::thread::ThreadPool* threads =
      context->device()->tensorflow_cpu_worker_threads()->workers;
  context->device()->tensorflow_accelerator_device_info()->event_mgr->ThenExecute(
      context->op_device_context()->stream(),
      [threads, check = std::move(check), done = std::move(done)] {
        threads->Schedule([check, done] {
          check();
          done();
        });
      });
}

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_KERNELS_GPU_STREAM_H_
