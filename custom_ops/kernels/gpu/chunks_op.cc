#include "custom_ops/kernels/call_op.h"
#include "custom_ops/kernels/chunks_args.h"
#include "custom_ops/kernels/gpu/stream.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

// Any floats are valid, so there is no check.
tensorflow::Status SelectInChunks(tensorflow::OpKernelContext* context,
                                  const ChunkedTopKCall& call) {
  const RedsyncGpuChunks chunks = {call.chunks, call.number,    call.size,
                                   call.k,      call.positions, call.values};
  return FromCode(redsync_gpu_chunked_top_k(&chunks, StreamOf(context)), "Top-k of chunks");
}

REGISTER_KERNEL_BUILDER(Name("RedsyncChunkedTopK").Device(tensorflow::DEVICE_GPU),
                        CallOp<ChunkedTopKCall, SelectInChunks>);

}  // namespace
}  // namespace redsync
