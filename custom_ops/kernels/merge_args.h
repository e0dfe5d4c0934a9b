// Attributes, inputs and outputs of the sparse merge, the same on all devices.
#ifndef TF_REDSYNC_CUSTOM_OPS_KERNELS_MERGE_ARGS_H_
#define TF_REDSYNC_CUSTOM_OPS_KERNELS_MERGE_ARGS_H_

#include <string>
#include <vector>

#include "custom_ops/core/cpu/merge.h"
#include "custom_ops/kernels/op_support.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {

struct MergeAttributes {
  std::vector<int64_t> sizes, k;

  tensorflow::Status Read(tensorflow::OpKernelConstruction* context) {
    int n;
    TF_RETURN_IF_ERROR(context->GetAttr("N", &n));
    TF_RETURN_IF_ERROR(context->GetAttr("sizes", &sizes));
    TF_RETURN_IF_ERROR(context->GetAttr("k", &k));
    TF_RETURN_IF_ERROR(CheckList("sizes", sizes, n, 0, kMaxElements));
    return CheckList("k", k, n, 0, INT32_MAX);
  }
};

struct MergeInputs {
  tensorflow::OpInputList indices, values;
  const tensorflow::Tensor* counts;
  int64_t ranks;
  std::vector<int64_t> slots;

  // Checks the shapes.
  tensorflow::Status Read(tensorflow::OpKernelContext* context) {
    TF_RETURN_IF_ERROR(context->input_list("indices", &indices));
    TF_RETURN_IF_ERROR(context->input_list("values", &values));
    TF_RETURN_IF_ERROR(context->input("counts", &counts));
    TF_RETURN_IF_ERROR(CheckShape("counts", *counts, -1, indices.size()));
    ranks = counts->dim_size(0);
    for (int i = 0; i < indices.size(); ++i) {
      slots.push_back(indices[i].dims() == 2 ? indices[i].dim_size(1) : 0);
      TF_RETURN_IF_ERROR(CheckShape("indices", indices[i], ranks, slots[i]));
      TF_RETURN_IF_ERROR(CheckShape("values", values[i], ranks, slots[i]));
      TF_RETURN_IF_ERROR(CheckEntries(i, indices[i], ranks * slots[i]));
    }
    return tensorflow::OkStatus();
  }
};

// Allocates the outputs `<name>_indices`, `<name>_values` and `<name>_counts`.
inline tensorflow::Status AllocateSparse(tensorflow::OpKernelContext* context,
                                         const std::string& name, const std::vector<int64_t>& slots,
                                         std::vector<SparseOutput>* outputs) {
  const int64_t n = slots.size();
  tensorflow::OpOutputList indices, values;
  tensorflow::Tensor* counts;
  TF_RETURN_IF_ERROR(context->output_list(name + "_indices", &indices));
  TF_RETURN_IF_ERROR(context->output_list(name + "_values", &values));
  TF_RETURN_IF_ERROR(
      context->allocate_output(name + "_counts", tensorflow::TensorShape({n}), &counts));
  for (int64_t i = 0; i < n; ++i) {
    tensorflow::Tensor *of_indices, *of_values;
    TF_RETURN_IF_ERROR(indices.allocate(i, tensorflow::TensorShape({slots[i]}), &of_indices));
    TF_RETURN_IF_ERROR(values.allocate(i, tensorflow::TensorShape({slots[i]}), &of_values));
    (*outputs)[i] = {Words(of_indices), of_values->flat<float>().data(),
                     counts->flat<int32_t>().data() + i};
  }
  return tensorflow::OkStatus();
}

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_KERNELS_MERGE_ARGS_H_
