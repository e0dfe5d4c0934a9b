#include <vector>

#include "custom_ops/core/cpu/chunks.h"
#include "custom_ops/kernels/codec.h"
#include "custom_ops/kernels/layout.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;
using ::tensorflow::errors::InvalidArgument;

constexpr int64_t kElementCost = 2;  // Cycles to look at one.

class ChunkedTopKOp : public tensorflow::OpKernel {
 public:
  explicit ChunkedTopKOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, ReadInt(context, "k", 0, INT32_MAX, &k_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& chunks = context->input(0);
    OP_REQUIRES(context, chunks.dims() == 2,
                InvalidArgument("`chunks` must have shape [chunks, size]. Received: ",
                                chunks.shape().DebugString(), "."));
    const int64_t number = chunks.dim_size(0), size = chunks.dim_size(1), k = k_;
    OP_REQUIRES(context, k <= size && size <= INT32_MAX,
                InvalidArgument("`k` must be at most the size of a chunk, which is less than 2^31. "
                                "Received: k=",
                                k, ", size ", size, "."));
    Tensor *positions, *values;
    const TensorShape shape({number, k});
    OP_REQUIRES_OK(context, context->allocate_output("positions", shape, &positions));
    OP_REQUIRES_OK(context, context->allocate_output("values", shape, &values));
    if (shape.num_elements() == 0) return;
    const float* from = chunks.flat<float>().data();
    int32_t* at = positions->flat<int32_t>().data();
    float* to = values->flat<float>().data();
    IntraOpThreads(context)(number, kElementCost * size, [&](int64_t first, int64_t last) {
      std::vector<int32_t> scratch(ChunkScratch(size));
      for (int64_t c = first; c < last; ++c) {
        TopOfChunk(from + c * size, size, k, scratch.data(), at + c * k, to + c * k);
      }
    });
  }

 private:
  int64_t k_;
};

REGISTER_KERNEL_BUILDER(Name("RedsyncChunkedTopK").Device(tensorflow::DEVICE_CPU), ChunkedTopKOp);

}  // namespace
}  // namespace redsync
