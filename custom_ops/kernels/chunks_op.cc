#include <vector>

#include "custom_ops/core/cpu/chunks.h"
#include "custom_ops/kernels/chunks_args.h"
#include "custom_ops/kernels/op_support.h"
#include "custom_ops/kernels/select_args.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;

constexpr int64_t kElementCost = 2;  // Cycles to look at one.

class ChunkedTopKOp : public tensorflow::OpKernel {
 public:
  explicit ChunkedTopKOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, ReadInt(context, "k", 0, INT32_MAX, &k_));
  }

  void Compute(OpKernelContext* context) override {
    ChunkedTopK call;
    OP_REQUIRES_OK(context, call.Read(context, k_));
    if (call.number * call.k == 0) return;
    const int64_t size = call.size, k = call.k;
    IntraOpThreads(context)(call.number, kElementCost * size, [&](int64_t first, int64_t last) {
      std::vector<int32_t> scratch(ChunkScratch(size));
      for (int64_t c = first; c < last; ++c) {
        TopOfChunk(call.chunks + c * size, size, k, scratch.data(), call.positions + c * k,
                   call.values + c * k);
      }
    });
  }

 private:
  int64_t k_;
};

REGISTER_KERNEL_BUILDER(Name("RedsyncChunkedTopK").Device(tensorflow::DEVICE_CPU), ChunkedTopKOp);

}  // namespace
}  // namespace redsync
