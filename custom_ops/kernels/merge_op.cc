#include <vector>

#include "custom_ops/core/cpu/merge.h"
#include "custom_ops/kernels/merge_args.h"
#include "custom_ops/kernels/op_support.h"
#include "custom_ops/kernels/select_args.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;

constexpr int64_t kEntryCost = 60;  // Cycles to sort an entry in.

class SparseMergeOp : public tensorflow::OpKernel {
 public:
  explicit SparseMergeOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, attributes_.Read(context));
  }

  void Compute(OpKernelContext* context) override {
    MergeInputs in;
    OP_REQUIRES_OK(context, in.Read(context));
    const int64_t n = in.indices.size();
    std::vector<SparseBlocks> blocks;
    std::vector<int64_t> scratch_at = {0}, rest;
    for (int64_t i = 0; i < n; ++i) {
      blocks.push_back({Words(in.indices[i]), in.values[i].flat<float>().data(),
                        in.counts->flat<int32_t>().data() + i, n, in.ranks, in.slots[i],
                        attributes_.sizes[i]});
      scratch_at.push_back(scratch_at.back() + MergeScratchBytes(in.ranks, in.slots[i]));
      rest.push_back(in.ranks * in.slots[i]);
    }
    std::vector<SparseOutput> kept(n), dropped(n);
    OP_REQUIRES_OK(context, AllocateSparse(context, "kept", attributes_.k, &kept));
    OP_REQUIRES_OK(context, AllocateSparse(context, "dropped", rest, &dropped));
    Tensor scratch;
    OP_REQUIRES_OK(context, context->allocate_temp(tensorflow::DT_UINT8,
                                                   TensorShape({scratch_at.back()}), &scratch));
    auto* memory = static_cast<char*>(scratch.data());
    std::vector<CodecError> errors(n);
    const int64_t cost = kEntryCost * scratch_at.back() / 16 / n;
    IntraOpThreads(context)(n, cost, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        SparseMerge(blocks[i], attributes_.k[i], memory + scratch_at[i],
                    scratch_at[i + 1] - scratch_at[i], kept[i], dropped[i], &errors[i]);
        errors[i].tensor = i;
      }
    });
    OP_REQUIRES_OK(context, FirstError("blocks", errors));
  }

 private:
  MergeAttributes attributes_;
};

REGISTER_KERNEL_BUILDER(Name("RedsyncSparseMerge").Device(tensorflow::DEVICE_CPU), SparseMergeOp);

}  // namespace
}  // namespace redsync
