// Layout of a message, and what the kernels share.
#ifndef TF_REDSYNC_CUSTOM_OPS_KERNELS_LAYOUT_H_
#define TF_REDSYNC_CUSTOM_OPS_KERNELS_LAYOUT_H_

#include <string>
#include <vector>

#include "custom_ops/core/cpu/common.h"
#include "custom_ops/core/cpu/decode.h"
#include "custom_ops/core/cpu/select.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {

// The attributes `selectors` and `quantized`.
struct TensorAttributes {
  std::vector<Selector> selectors;
  std::vector<bool> quantized;

  tensorflow::Status Read(tensorflow::OpKernelConstruction* context);
};

// The parts of a message, one per tensor of `tensors`; checks `k` and the sizes.
tensorflow::Status MakeParts(const TensorAttributes& attributes, const std::string& name,
                             const tensorflow::OpInputList& tensors, const tensorflow::Tensor& k,
                             std::vector<Part>* parts);

// Words of a message with these parts.
inline int64_t MessageWords(const std::vector<Part>& parts) {
  return parts.empty() ? 1 : parts.back().offset + parts.back().words();
}

// TensorFlow's own intra-op threads.
ParallelFor IntraOpThreads(tensorflow::OpKernelContext* context);

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_KERNELS_LAYOUT_H_
