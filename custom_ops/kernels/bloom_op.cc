#include <algorithm>
#include <vector>

#include "custom_ops/core/cpu/bloom.h"
#include "custom_ops/kernels/call_op.h"
#include "custom_ops/kernels/op_support.h"
#include "custom_ops/kernels/position_args.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpKernelContext;

constexpr int64_t kInsertCost = 50;  // Cycles to add a position.

std::vector<BloomFormat> SeededFormats(const BloomLayout& layout) {
  std::vector<BloomFormat> formats = layout.formats;
  for (BloomFormat& format : formats) format.seed = static_cast<uint32_t>(*layout.seed);
  return formats;
}

tensorflow::Status BuildBloom(OpKernelContext* context, const BloomBuildCall& call) {
  const std::vector<BloomFormat> formats = SeededFormats(call);
  const int64_t n = call.indices.size();
  std::vector<CodecError> errors(n);
  IntraOpThreads(context)(n, kInsertCost * call.words, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const tensorflow::Tensor& positions = call.indices[static_cast<int>(i)];
      BloomBuild(formats[i], Words(positions), positions.NumElements(), call.counts[i],
                 call.filters + call.offsets[i], &errors[i]);
      errors[i].tensor = i;
    }
  });
  return FirstError("indices", errors);
}

tensorflow::Status QueryBloom(OpKernelContext* context, const BloomQueryCall& call) {
  const std::vector<BloomFormat> formats = SeededFormats(call);
  int64_t bytes = 0;
  for (const BloomFormat& format : formats) {
    bytes = std::max(bytes, BloomScratchBytes(format.size));
  }
  tensorflow::Tensor scratch;
  TF_RETURN_IF_ERROR(
      context->allocate_temp(tensorflow::DT_UINT8, tensorflow::TensorShape({bytes}), &scratch));
  const ParallelFor threads = IntraOpThreads(context);
  const auto n = static_cast<int64_t>(formats.size());
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t rank = 0; rank < call.ranks; ++rank) {
      const int32_t* filter = call.filters + rank * call.words + call.offsets[i];
      call.out.counts[rank * n + i] =
          static_cast<int32_t>(BloomQuery(formats[i], filter, call.slots[i], scratch.data(),
                                          threads, call.out.positions[i] + rank * call.slots[i]));
    }
  }
  return tensorflow::OkStatus();
}

REGISTER_KERNEL_BUILDER(Name("RedsyncBloomBuild").Device(tensorflow::DEVICE_CPU),
                        CallOp<BloomBuildCall, BuildBloom>);
REGISTER_KERNEL_BUILDER(Name("RedsyncBloomQuery").Device(tensorflow::DEVICE_CPU),
                        CallOp<BloomQueryCall, QueryBloom>);

}  // namespace
}  // namespace redsync
