#include "custom_ops/kernels/op_support.h"

#include <cmath>

namespace redsync {

using ::tensorflow::errors::InvalidArgument;
using ::tensorflow::strings::StrCat;

tensorflow::Status Describe(const char* name, const CodecError& e) {
  const bool whole = e.value == std::floor(e.value) && std::fabs(e.value) < 1e15;
  const std::string value =
      whole ? StrCat(static_cast<int64_t>(e.value)) : StrCat(static_cast<float>(e.value));
  return InvalidArgument(
      "`", name, "` hold an invalid ", e.field, e.tensor < 0 ? "" : StrCat(" of tensor ", e.tensor),
      ". Received: ", value, e.rank < 0 ? "" : StrCat(" from rank ", e.rank), ", slot ", e.slot,
      "; it must be ", e.rule ? e.rule : StrCat("in [0, ", e.limit, "]"), ".",
      e.rank < 0 ? "" : " Do all workers run the same version and configuration?");
}

tensorflow::Status CheckShape(const char* name, const tensorflow::Tensor& tensor, int64_t rows,
                              int64_t columns) {
  const bool vector = rows == -2;
  if (tensor.dims() == (vector ? 1 : 2) && tensor.dim_size(vector ? 0 : 1) == columns &&
      (rows < 0 || tensor.dim_size(0) == rows)) {
    return tensorflow::OkStatus();
  }
  const std::string first = vector ? "" : rows < 0 ? "workers, " : StrCat(rows, ", ");
  return InvalidArgument("`", name, "` must have shape [", first, columns,
                         "]. Received: ", tensor.shape().DebugString(), ".");
}

tensorflow::Status CheckList(const char* name, const std::vector<int64_t>& values, size_t n,
                             int64_t low, int64_t high) {
  if (values.size() != n) {
    return InvalidArgument("`", name, "` must have one entry per tensor. Received: ", values.size(),
                           " for ", n, " tensors.");
  }
  for (size_t i = 0; i < n; ++i) {
    if (values[i] >= low && values[i] <= high) continue;
    return InvalidArgument("`", name, "` must be in [", low, ", ", high, "]. Received: ", name, "[",
                           i, "]=", values[i], ".");
  }
  return tensorflow::OkStatus();
}

tensorflow::Status ReadInt(tensorflow::OpKernelConstruction* context, const char* name, int64_t low,
                           int64_t high, int64_t* value) {
  TF_RETURN_IF_ERROR(context->GetAttr(name, value));
  return CheckList(name, {*value}, 1, low, high);
}

tensorflow::Status ReadPositions(tensorflow::OpKernelContext* context,
                                 tensorflow::OpInputList* indices,
                                 const tensorflow::Tensor** counts) {
  TF_RETURN_IF_ERROR(context->input_list("indices", indices));
  TF_RETURN_IF_ERROR(context->input("counts", counts));
  TF_RETURN_IF_ERROR(CheckShape("counts", **counts, -2, indices->size()));
  for (int i = 0; i < indices->size(); ++i) {
    const tensorflow::Tensor& tensor = (*indices)[i];
    TF_RETURN_IF_ERROR(CheckShape("indices", tensor, -2, tensor.NumElements()));
    TF_RETURN_IF_ERROR(CheckEntries(i, tensor, tensor.NumElements()));
  }
  return tensorflow::OkStatus();
}

tensorflow::Status CheckEntries(int i, const tensorflow::Tensor& tensor, int64_t entries) {
  if (entries <= INT32_MAX) return tensorflow::OkStatus();
  return InvalidArgument("`indices` must have at most ", INT32_MAX,
                         " entries each, which are counted in int32. Received: indices[", i,
                         "] of shape ", tensor.shape().DebugString(), ".");
}

tensorflow::Status FirstError(const char* name, const std::vector<CodecError>& errors) {
  for (const CodecError& error : errors) {
    if (error.found()) return Describe(name, error);
  }
  return tensorflow::OkStatus();
}

}  // namespace redsync
