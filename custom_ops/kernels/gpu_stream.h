// The step from TensorFlow to the CUDA core, without CUDA headers: streams, errors, callbacks.
#ifndef TF_REDSYNC_CUSTOM_OPS_KERNELS_GPU_STREAM_H_
#define TF_REDSYNC_CUSTOM_OPS_KERNELS_GPU_STREAM_H_

#include <functional>

#include "custom_ops/core/gpu/c_api.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {

// The cudaStream_t on which TensorFlow runs the kernels of this device.
void* StreamOf(tensorflow::OpKernelContext* context);

// Status for a code of the C interface.
tensorflow::Status FromCode(int code, const char* what);

// Memory for a record on the device, and for its copy on the host.
struct RecordPair {
  tensorflow::Tensor on_device, on_host;

  tensorflow::Status Allocate(tensorflow::OpKernelContext* context);
  RedsyncGpuRecord* device() { return reinterpret_cast<RedsyncGpuRecord*>(on_device.data()); }
  const RedsyncGpuRecord& host() const {
    return *reinterpret_cast<const RedsyncGpuRecord*>(on_host.data());
  }
};

// Copies the record to the host when the stream gets there, and then calls check(ok) and done() on
// one of TensorFlow's threads. No thread waits in between. `ok` is false if the device has failed.
void CheckThenDone(tensorflow::OpKernelContext* context, RecordPair* record,
                   std::function<void(bool ok)> check,
                   tensorflow::AsyncOpKernel::DoneCallback done);

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_KERNELS_GPU_STREAM_H_
