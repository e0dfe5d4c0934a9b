#include "custom_ops/kernels/chunks_args.h"
#include "custom_ops/kernels/gpu/stream.h"
#include "custom_ops/kernels/op_support.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;

// Queues redsync_gpu_chunked_top_k(). Nothing can be wrong with floats: nobody has to wait.
class GpuChunkedTopKOp : public tensorflow::OpKernel {
 public:
  explicit GpuChunkedTopKOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, ReadInt(context, "k", 0, INT32_MAX, &k_));
  }

  void Compute(OpKernelContext* context) override {
    ChunkedTopK call;
    OP_REQUIRES_OK(context, call.Read(context, k_));
    const RedsyncGpuChunks chunks = {call.chunks, call.number,    call.size,
                                     call.k,      call.positions, call.values};
    OP_REQUIRES_OK(context, FromCode(redsync_gpu_chunked_top_k(&chunks, StreamOf(context)),
                                     "Top-k of chunks"));
  }

 private:
  int64_t k_;
};

REGISTER_KERNEL_BUILDER(Name("RedsyncChunkedTopK").Device(tensorflow::DEVICE_GPU),
                        GpuChunkedTopKOp);

}  // namespace
}  // namespace redsync
