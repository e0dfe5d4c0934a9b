#include <vector>

#include "custom_ops/core/cpu/merge.h"
#include "custom_ops/kernels/codec.h"
#include "custom_ops/kernels/layout.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpInputList;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::OpOutputList;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;
using ::tensorflow::errors::InvalidArgument;

constexpr int64_t kEntryCost = 60;  // Cycles to sort an entry in.

class SparseMergeOp : public tensorflow::OpKernel {
 public:
  explicit SparseMergeOp(OpKernelConstruction* context) : OpKernel(context) {
    int n;
    OP_REQUIRES_OK(context, context->GetAttr("N", &n));
    OP_REQUIRES_OK(context, context->GetAttr("sizes", &sizes_));
    OP_REQUIRES_OK(context, context->GetAttr("k", &k_));
    OP_REQUIRES_OK(context, CheckList("sizes", sizes_, n, 0, INT32_MAX));
    OP_REQUIRES_OK(context, CheckList("k", k_, n, 0, INT32_MAX));
  }

  void Compute(OpKernelContext* context) override {
    OpInputList indices, values;
    const Tensor* counts;
    OP_REQUIRES_OK(context, context->input_list("indices", &indices));
    OP_REQUIRES_OK(context, context->input_list("values", &values));
    OP_REQUIRES_OK(context, context->input("counts", &counts));
    const int64_t n = indices.size();
    OP_REQUIRES_OK(context, CheckShape("counts", *counts, -1, n));
    const int64_t ranks = counts->dim_size(0);
    std::vector<SparseBlocks> blocks;
    std::vector<int64_t> scratch_at = {0};
    for (int64_t i = 0; i < n; ++i) {
      const int64_t slots = indices[i].dims() == 2 ? indices[i].dim_size(1) : 0;
      OP_REQUIRES_OK(context, CheckShape("indices", indices[i], ranks, slots));
      OP_REQUIRES_OK(context, CheckShape("values", values[i], ranks, slots));
      OP_REQUIRES(context, ranks * slots <= INT32_MAX,
                  InvalidArgument("`indices` must have at most 2147483647 entries each. Received: "
                                  "indices[",
                                  i, "] of shape ", indices[i].shape().DebugString(), "."));
      blocks.push_back({indices[i].flat<int32_t>().data(), values[i].flat<float>().data(),
                        counts->flat<int32_t>().data() + i, n, ranks, slots, sizes_[i]});
      scratch_at.push_back(scratch_at.back() + MergeScratchBytes(ranks, slots));
    }
    std::vector<SparseOutput> kept(n), dropped(n);
    OP_REQUIRES_OK(context, Allocate(context, "kept", k_, &kept));
    std::vector<int64_t> rest;
    for (const SparseBlocks& block : blocks) rest.push_back(ranks * block.slots);
    OP_REQUIRES_OK(context, Allocate(context, "dropped", rest, &dropped));
    Tensor scratch;
    OP_REQUIRES_OK(context, context->allocate_temp(tensorflow::DT_UINT8,
                                                   TensorShape({scratch_at.back()}), &scratch));
    auto* memory = static_cast<char*>(scratch.data());
    std::vector<CodecError> errors(n);
    const int64_t cost = kEntryCost * scratch_at.back() / 16 / n;
    IntraOpThreads(context)(n, cost, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        SparseMerge(blocks[i], k_[i], memory + scratch_at[i], scratch_at[i + 1] - scratch_at[i],
                    kept[i], dropped[i], &errors[i]);
        errors[i].tensor = i;
      }
    });
    OP_REQUIRES_OK(context, FirstError("blocks", errors));
  }

 private:
  // Allocates the outputs `<name>_indices`, `<name>_values` and `<name>_counts`.
  static tensorflow::Status Allocate(OpKernelContext* context, const std::string& name,
                                     const std::vector<int64_t>& slots,
                                     std::vector<SparseOutput>* outputs) {
    const int64_t n = slots.size();
    OpOutputList indices, values;
    Tensor* counts;
    TF_RETURN_IF_ERROR(context->output_list(name + "_indices", &indices));
    TF_RETURN_IF_ERROR(context->output_list(name + "_values", &values));
    TF_RETURN_IF_ERROR(context->allocate_output(name + "_counts", TensorShape({n}), &counts));
    for (int64_t i = 0; i < n; ++i) {
      Tensor *of_indices, *of_values;
      TF_RETURN_IF_ERROR(indices.allocate(i, TensorShape({slots[i]}), &of_indices));
      TF_RETURN_IF_ERROR(values.allocate(i, TensorShape({slots[i]}), &of_values));
      (*outputs)[i] = {of_indices->flat<int32_t>().data(), of_values->flat<float>().data(),
                       counts->flat<int32_t>().data() + i};
    }
    return tensorflow::OkStatus();
  }

  std::vector<int64_t> sizes_, k_;
};

REGISTER_KERNEL_BUILDER(Name("RedsyncSparseMerge").Device(tensorflow::DEVICE_CPU), SparseMergeOp);

}  // namespace
}  // namespace redsync
