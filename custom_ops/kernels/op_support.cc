#include "custom_ops/kernels/op_support.h"

#include <cmath>

#include "tensorflow/core/util/work_sharder.h"

namespace redsync {

using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::errors::InvalidArgument;
using ::tensorflow::strings::StrCat;

tensorflow::Status ReadInt(tensorflow::OpKernelConstruction* context, const char* name, int64_t low,
                           int64_t high, int64_t* value) {
  TF_RETURN_IF_ERROR(context->GetAttr(name, value));
  return CheckList(name, {*value}, 1, low, high);
}

tensorflow::Status CheckOnePerTensor(const char* name, size_t entries, size_t n) {
  if (entries == n) return tensorflow::OkStatus();
  return InvalidArgument("`", name, "` must have one entry per tensor. Received: ", entries,
                         " for ", n, " tensors.");
}

tensorflow::Status CheckList(const char* name, const std::vector<int64_t>& values, size_t n,
                             int64_t low, int64_t high) {
  TF_RETURN_IF_ERROR(CheckOnePerTensor(name, values.size(), n));
  for (size_t i = 0; i < n; ++i) {
    if (values[i] >= low && values[i] <= high) continue;
    return InvalidArgument("`", name, "` must be in [", low, ", ", high, "]. Received: ", name, "[",
                           i, "]=", values[i], ".");
  }
  return tensorflow::OkStatus();
}

tensorflow::Status ReadList(tensorflow::OpKernelConstruction* context, const char* name, size_t n,
                            int64_t low, int64_t high, std::vector<int64_t>* values) {
  TF_RETURN_IF_ERROR(context->GetAttr(name, values));
  return CheckList(name, *values, n, low, high);
}

tensorflow::Status CheckVector(const char* name, const Tensor& tensor, int64_t columns) {
  if (tensor.dims() == 1 && tensor.dim_size(0) == columns) return tensorflow::OkStatus();
  return InvalidArgument("`", name, "` must have shape [", columns,
                         "]. Received: ", tensor.shape().DebugString(), ".");
}

tensorflow::Status CheckMatrix(const char* name, const Tensor& tensor, int64_t rows,
                               int64_t columns) {
  if (tensor.dims() == 2 && tensor.dim_size(1) == columns &&
      (rows == kAnyRows || tensor.dim_size(0) == rows)) {
    return tensorflow::OkStatus();
  }
  const std::string first = rows == kAnyRows ? "workers" : StrCat(rows);
  return InvalidArgument("`", name, "` must have shape [", first, ", ", columns,
                         "]. Received: ", tensor.shape().DebugString(), ".");
}

tensorflow::Status ReadScalar(OpKernelContext* context, const char* name, const Tensor** tensor) {
  TF_RETURN_IF_ERROR(context->input(name, tensor));
  if ((*tensor)->dims() == 0) return tensorflow::OkStatus();
  return InvalidArgument("`", name, "` must be a scalar. Received: shape ",
                         (*tensor)->shape().DebugString(), ".");
}

tensorflow::Status ReadPositions(OpKernelContext* context, tensorflow::OpInputList* indices,
                                 const Tensor** counts) {
  TF_RETURN_IF_ERROR(context->input_list("indices", indices));
  TF_RETURN_IF_ERROR(context->input("counts", counts));
  TF_RETURN_IF_ERROR(CheckVector("counts", **counts, indices->size()));
  for (int i = 0; i < indices->size(); ++i) {
    const Tensor& tensor = (*indices)[i];
    TF_RETURN_IF_ERROR(CheckVector("indices", tensor, tensor.NumElements()));
    TF_RETURN_IF_ERROR(CheckEntries(i, tensor, tensor.NumElements()));
  }
  return tensorflow::OkStatus();
}

tensorflow::Status CheckEntries(int i, const Tensor& tensor, int64_t entries) {
  if (entries <= INT32_MAX) return tensorflow::OkStatus();
  return InvalidArgument("`indices` must have at most ", INT32_MAX,
                         " entries each, which are counted in int32. Received: indices[", i,
                         "] of shape ", tensor.shape().DebugString(), ".");
}

tensorflow::Status ForwardOrAllocate(OpKernelContext* context, int input, int output,
                                     float** memory) {
  Tensor* tensor;
  TF_RETURN_IF_ERROR(context->forward_input_or_allocate_output(
      {input}, output, context->input(input).shape(), &tensor));
  *memory = tensor->flat<float>().data();
  return tensorflow::OkStatus();
}

ParallelFor IntraOpThreads(OpKernelContext* context) {
  const auto* workers = context->device()->tensorflow_cpu_worker_threads();
  return [workers](int64_t count, int64_t cost, const RangeBody& body) {
    if (count > 0) tensorflow::Shard(workers->num_threads, workers->workers, count, cost, body);
  };
}

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

tensorflow::Status FirstError(const char* name, const std::vector<CodecError>& errors) {
  for (const CodecError& error : errors) {
    if (error.found()) return Describe(name, error);
  }
  return tensorflow::OkStatus();
}

}  // namespace redsync
