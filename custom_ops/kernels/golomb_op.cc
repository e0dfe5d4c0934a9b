#include <vector>

#include "custom_ops/core/cpu/golomb.h"
#include "custom_ops/kernels/call_op.h"
#include "custom_ops/kernels/op_support.h"
#include "custom_ops/kernels/position_args.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpKernelContext;

constexpr int64_t kPositionCost = 20;  // Cycles to code a position.

tensorflow::Status EncodeGolomb(OpKernelContext* context, const GolombEncodeCall& call) {
  const int64_t n = call.indices.size();
  std::vector<CodecError> errors(n);
  IntraOpThreads(context)(n, kPositionCost * call.words, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      GolombEncode(call.formats[i], Words(call.indices[static_cast<int>(i)]), call.counts[i],
                   call.message + call.offsets[i], &errors[i]);
      errors[i].tensor = i;
    }
  });
  return FirstError("indices", errors);
}

tensorflow::Status DecodeGolomb(OpKernelContext* context, const GolombDecodeCall& call) {
  const auto n = static_cast<int64_t>(call.formats.size());
  std::vector<CodecError> errors(call.ranks * n);
  const int64_t cost = kPositionCost * call.words;
  IntraOpThreads(context)(call.ranks * n, cost, [&](int64_t first, int64_t last) {
    for (int64_t item = first; item < last; ++item) {
      const int64_t rank = item / n, i = item % n;
      GolombDecode(call.formats[i], call.messages + rank * call.words + call.offsets[i],
                   call.out.positions[i] + rank * call.slots[i], call.out.counts + item,
                   &errors[item]);
      errors[item].rank = rank;
      errors[item].tensor = i;
    }
  });
  return FirstError("messages", errors);
}

REGISTER_KERNEL_BUILDER(Name("RedsyncGolombEncode").Device(tensorflow::DEVICE_CPU),
                        CallOp<GolombEncodeCall, EncodeGolomb>);
REGISTER_KERNEL_BUILDER(Name("RedsyncGolombDecode").Device(tensorflow::DEVICE_CPU),
                        CallOp<GolombDecodeCall, DecodeGolomb>);

}  // namespace
}  // namespace redsync
