#include "custom_ops/kernels/gpu_stream.h"

#include <memory>
#include <utility>

#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/lib/core/threadpool.h"
#include "xla/stream_executor/stream.h"

namespace redsync {
namespace {

using ::tensorflow::OpKernelContext;
using ::tensorflow::TensorShape;

struct Waiting {
  tensorflow::thread::ThreadPool* threads;
  std::function<void(bool)> check;
  tensorflow::AsyncOpKernel::DoneCallback done;
};

// On a thread of the driver, where CUDA must not be called: done() may well run the next kernel.
void Continue(void* data, int ok) {
  std::shared_ptr<Waiting> waiting(static_cast<Waiting*>(data));
  waiting->threads->Schedule([waiting, ok] {
    waiting->check(ok != 0);
    waiting->done();
  });
}

}  // namespace

void* StreamOf(OpKernelContext* context) {
  return context->op_device_context()->stream()->platform_specific_handle().stream;
}

tensorflow::Status FromCode(int code, const char* what) {
  if (code == REDSYNC_GPU_OK) return tensorflow::OkStatus();
  return tensorflow::errors::Internal(
      what, " failed on the GPU with code ", code, code == REDSYNC_GPU_CUDA_ERROR ? ": " : "",
      code == REDSYNC_GPU_CUDA_ERROR ? redsync_gpu_last_error() : "", ".");
}

tensorflow::Status RecordPair::Allocate(OpKernelContext* context) {
  const TensorShape shape({sizeof(RedsyncGpuRecord)});
  TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_UINT8, shape, &on_device));
  tensorflow::AllocatorAttributes pinned;
  pinned.set_on_host(true);
  pinned.set_gpu_compatible(true);
  return context->allocate_temp(tensorflow::DT_UINT8, shape, &on_host, pinned);
}

void CheckThenDone(OpKernelContext* context, RecordPair* record, std::function<void(bool)> check,
                   tensorflow::AsyncOpKernel::DoneCallback done) {
  void* stream = StreamOf(context);
  OP_REQUIRES_OK_ASYNC(context,
                       FromCode(redsync_gpu_copy(record->on_host.data(), record->on_device.data(),
                                                 sizeof(RedsyncGpuRecord), stream),
                                "Copying the record of errors"),
                       done);
  auto waiting = std::make_unique<Waiting>();
  waiting->threads = context->device()->tensorflow_cpu_worker_threads()->workers;
  waiting->check = std::move(check);
  waiting->done = done;
  const int code = redsync_gpu_then(stream, Continue, waiting.get());
  OP_REQUIRES_OK_ASYNC(context, FromCode(code, "Waiting for the record of errors"), done);
  waiting.release();
}

}  // namespace redsync
