// Attributes, inputs and outputs of RedsyncSparseMerge; see call_op.h.
#ifndef TF_REDSYNC_CUSTOM_OPS_KERNELS_MERGE_ARGS_H_
#define TF_REDSYNC_CUSTOM_OPS_KERNELS_MERGE_ARGS_H_

#include <string>
#include <vector>

#include "custom_ops/core/cpu/merge.h"
#include "custom_ops/kernels/op_support.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {

struct SparseMergeCall {
  std::vector<int64_t> sizes, k;
  tensorflow::OpInputList indices, values;
  const int32_t* counts = nullptr;  // [ranks, tensors]
  std::vector<int64_t> slots;       // Slots of a rank.
  int64_t ranks = 0;
  std::vector<SparseOutput> kept, dropped;

  tensorflow::Status ReadAttributes(tensorflow::OpKernelConstruction* context) {
    int n;
    TF_RETURN_IF_ERROR(context->GetAttr("N", &n));
    TF_RETURN_IF_ERROR(ReadList(context, "sizes", n, 0, kMaxElements, &sizes));
    return ReadList(context, "k", n, 0, INT32_MAX, &k);
  }

  tensorflow::Status Prepare(tensorflow::OpKernelContext* context) {
    const tensorflow::Tensor* of_each = nullptr;
    TF_RETURN_IF_ERROR(context->input_list("indices", &indices));
    TF_RETURN_IF_ERROR(context->input_list("values", &values));
    TF_RETURN_IF_ERROR(context->input("counts", &of_each));
    TF_RETURN_IF_ERROR(CheckMatrix("counts", *of_each, kAnyRows, indices.size()));
    counts = of_each->flat<int32_t>().data();
    ranks = of_each->dim_size(0);
    std::vector<int64_t> entries;  // Entries of all ranks.
    for (int i = 0; i < indices.size(); ++i) {
      slots.push_back(indices[i].dims() == 2 ? indices[i].dim_size(1) : 0);
      entries.push_back(ranks * slots[i]);
      TF_RETURN_IF_ERROR(CheckMatrix("indices", indices[i], ranks, slots[i]));
      TF_RETURN_IF_ERROR(CheckMatrix("values", values[i], ranks, slots[i]));
      TF_RETURN_IF_ERROR(CheckEntries(i, indices[i], entries[i]));
    }
    TF_RETURN_IF_ERROR(Allocate(context, "kept", k, &kept));
    return Allocate(context, "dropped", entries, &dropped);
  }

 private:
  // Allocates the outputs `<name>_indices`, `<name>_values` and `<name>_counts`.
  static tensorflow::Status Allocate(tensorflow::OpKernelContext* context, const std::string& name,
                                     const std::vector<int64_t>& sizes,
                                     std::vector<SparseOutput>* outputs) {
    const auto n = static_cast<int>(sizes.size());
    tensorflow::OpOutputList indices, values;
    int32_t* counts = nullptr;
    TF_RETURN_IF_ERROR(context->output_list(name + "_indices", &indices));
    TF_RETURN_IF_ERROR(context->output_list(name + "_values", &values));
    TF_RETURN_IF_ERROR(
        AllocateOutput(context, name + "_counts", tensorflow::TensorShape({n}), &counts));
    for (int i = 0; i < n; ++i) {
      const tensorflow::TensorShape shape({sizes[i]});
      tensorflow::Tensor *of_indices, *of_values;
      TF_RETURN_IF_ERROR(indices.allocate(i, shape, &of_indices));
      TF_RETURN_IF_ERROR(values.allocate(i, shape, &of_values));
      outputs->push_back({Words(of_indices), of_values->flat<float>().data(), counts + i});
    }
    return tensorflow::OkStatus();
  }
};

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_KERNELS_MERGE_ARGS_H_
