// The step from TensorFlow to the CUDA core, without CUDA headers: streams, errors, callbacks.
#ifndef TF_REDSYNC_CUSTOM_OPS_KERNELS_GPU_STREAM_H_
#define TF_REDSYNC_CUSTOM_OPS_KERNELS_GPU_STREAM_H_

#include <functional>
#include <memory>
#include <utility>

#include "custom_ops/core/gpu/c_api.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/lib/core/threadpool.h"
#include "xla/stream_executor/stream.h"

namespace redsync {

// The cudaStream_t on which TensorFlow runs the kernels of this device.
inline void* StreamOf(tensorflow::OpKernelContext* context) {
  return context->op_device_context()->stream()->platform_specific_handle().stream;
}

// Status for a code of the C interface.
inline tensorflow::Status FromCode(int code, const char* what) {
  if (code == REDSYNC_GPU_OK) return tensorflow::OkStatus();
  const char* why = code == REDSYNC_GPU_CUDA_ERROR ? redsync_gpu_last_error() : "wrong arguments";
  return tensorflow::errors::Internal(what, " failed on the GPU with code ", code, ": ", why, ".");
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

// What is left to do when the stream has got to some place.
struct Waiting {
  tensorflow::thread::ThreadPool* threads;
  std::function<void(bool)> check;
  tensorflow::AsyncOpKernel::DoneCallback done;

  // On a thread of the driver, where CUDA must not be called: done() may well run the next kernel.
  static void Continue(void* data, int ok) {
    std::shared_ptr<Waiting> waiting(static_cast<Waiting*>(data));
    waiting->threads->Schedule([waiting, ok] {
      waiting->check(ok != 0);
      waiting->done();
    });
  }
};

// Copies the record to the host when the stream gets there, and then calls check(ok) and done() on
// one of TensorFlow's threads. No thread waits in between. `ok` is false if the device has failed.
inline void CheckThenDone(tensorflow::OpKernelContext* context, RecordPair* record,
                          std::function<void(bool ok)> check,
                          tensorflow::AsyncOpKernel::DoneCallback done) {
  void* stream = StreamOf(context);
  const int copied = redsync_gpu_copy(record->on_host.data(), record->on_device.data(),
                                      sizeof(RedsyncGpuRecord), stream);
  OP_REQUIRES_OK_ASYNC(context, FromCode(copied, "Copying the record of errors"), done);
  auto waiting = std::make_unique<Waiting>();
  waiting->threads = context->device()->tensorflow_cpu_worker_threads()->workers;
  waiting->check = std::move(check);
  waiting->done = done;
  const int code = redsync_gpu_then(stream, Waiting::Continue, waiting.get());
  if (code == REDSYNC_GPU_OK) waiting.release();  // Continue() has it, and may be done already.
  OP_REQUIRES_OK_ASYNC(context, FromCode(code, "Waiting for the record of errors"), done);
}

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_KERNELS_GPU_STREAM_H_
