#include <vector>

#include "custom_ops/core/cpu/merge.h"
#include "custom_ops/kernels/call_op.h"
#include "custom_ops/kernels/merge_args.h"
#include "custom_ops/kernels/op_support.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpKernelContext;

constexpr int64_t kEntryCost = 60;  // Cycles to merge an entry.

tensorflow::Status Merge(OpKernelContext* context, const SparseMergeCall& call) {
  const int64_t n = call.indices.size();
  std::vector<SparseBlocks> blocks;
  std::vector<int64_t> scratch_at = {0};
  for (int i = 0; i < n; ++i) {
    blocks.push_back({Words(call.indices[i]), call.values[i].flat<float>().data(), call.counts + i,
                      n, call.ranks, call.slots[i], call.sizes[i]});
    scratch_at.push_back(scratch_at.back() + MergeScratchBytes(call.ranks, call.slots[i]));
  }
  tensorflow::Tensor scratch;
  TF_RETURN_IF_ERROR(context->allocate_temp(
      tensorflow::DT_UINT8, tensorflow::TensorShape({scratch_at.back()}), &scratch));
  auto* memory = static_cast<char*>(scratch.data());
  std::vector<CodecError> errors(n);
  const int64_t cost = kEntryCost * scratch_at.back() / 16 / n;
  IntraOpThreads(context)(n, cost, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      SparseMerge(blocks[i], call.k[i], memory + scratch_at[i], scratch_at[i + 1] - scratch_at[i],
                  call.kept[i], call.dropped[i], &errors[i]);
      errors[i].tensor = i;
    }
  });
  return FirstError("blocks", errors);
}

REGISTER_KERNEL_BUILDER(Name("RedsyncSparseMerge").Device(tensorflow::DEVICE_CPU),
                        CallOp<SparseMergeCall, Merge>);

}  // namespace
}  // namespace redsync
