#include <vector>

#include "custom_ops/core/cpu/chunks.h"
#include "custom_ops/kernels/call_op.h"
#include "custom_ops/kernels/chunks_args.h"
#include "custom_ops/kernels/op_support.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

constexpr int64_t kElementCost = 2;  // Cycles per element.

tensorflow::Status SelectInChunks(tensorflow::OpKernelContext* context,
                                  const ChunkedTopKCall& call) {
  const int64_t size = call.size, k = call.k;
  if (call.number * k == 0) return tensorflow::OkStatus();
  IntraOpThreads(context)(call.number, kElementCost * size, [&](int64_t first, int64_t last) {
    std::vector<int32_t> scratch(ChunkScratch(size));
    for (int64_t c = first; c < last; ++c) {
      TopOfChunk(call.chunks + c * size, size, k, scratch.data(), call.positions + c * k,
                 call.values + c * k);
    }
  });
  return tensorflow::OkStatus();
}

REGISTER_KERNEL_BUILDER(Name("RedsyncChunkedTopK").Device(tensorflow::DEVICE_CPU),
                        CallOp<ChunkedTopKCall, SelectInChunks>);

}  // namespace
}  // namespace redsync
