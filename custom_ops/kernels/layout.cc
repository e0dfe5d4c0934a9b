#include "custom_ops/kernels/layout.h"

#include <algorithm>

#include "tensorflow/core/util/work_sharder.h"

namespace redsync {

using ::tensorflow::errors::InvalidArgument;

tensorflow::Status TensorAttributes::Read(tensorflow::OpKernelConstruction* context) {
  std::vector<std::string> names;
  int n;
  TF_RETURN_IF_ERROR(context->GetAttr("N", &n));
  TF_RETURN_IF_ERROR(context->GetAttr("selectors", &names));
  TF_RETURN_IF_ERROR(context->GetAttr("quantized", &quantized));
  if (static_cast<int>(names.size()) != n || static_cast<int>(quantized.size()) != n) {
    return InvalidArgument(
        "`selectors` and `quantized` must have one entry per tensor. Received: ", n, " tensors, ",
        names.size(), " selectors, ", quantized.size(), " quantized.");
  }
  for (const std::string& name : names) {
    selectors.push_back(name == "exact"     ? Selector::kExact
                        : name == "trimmed" ? Selector::kTrimmed
                        : name == "fixed"   ? Selector::kFixed
                                            : Selector::kThreshold);
  }
  return tensorflow::OkStatus();
}

tensorflow::Status MakeParts(const TensorAttributes& attributes, const std::string& name,
                             const tensorflow::OpInputList& tensors, const tensorflow::Tensor& k,
                             std::vector<Part>* parts) {
  if (k.dims() != 1 || k.NumElements() != tensors.size()) {
    return InvalidArgument("`k` must have shape [", tensors.size(),
                           "]. Received: ", k.shape().DebugString(), ".");
  }
  int64_t offset = 1;
  for (int i = 0; i < tensors.size(); ++i) {
    const int64_t size = tensors[i].NumElements(), ki = k.flat<int32_t>()(i);
    if (size > INT32_MAX) {
      return InvalidArgument("`", name,
                             "` must have at most 2147483647 elements each. Received: ", name, "[",
                             i, "] of shape ", tensors[i].shape().DebugString(), ".");
    }
    if (ki < std::min<int64_t>(size, 1) || ki > size) {
      return InvalidArgument("`k` must be in [1, size] (0 for an empty tensor). Received: k[", i,
                             "]=", ki, " for ", name, "[", i, "] of shape ",
                             tensors[i].shape().DebugString(), ".");
    }
    const int64_t slots = Capacity(size, ki, attributes.selectors[i]);
    parts->push_back({offset, slots, size, attributes.quantized[i]});
    offset += parts->back().words();
  }
  return tensorflow::OkStatus();
}

ParallelFor IntraOpThreads(tensorflow::OpKernelContext* context) {
  const auto* workers = context->device()->tensorflow_cpu_worker_threads();
  return [workers](int64_t count, int64_t cost, const RangeBody& body) {
    if (count > 0) tensorflow::Shard(workers->num_threads, workers->workers, count, cost, body);
  };
}

}  // namespace redsync
