// Layout of a message, checks of inputs, and what else the kernels share.
#ifndef TF_REDSYNC_CUSTOM_OPS_KERNELS_SELECT_ARGS_H_
#define TF_REDSYNC_CUSTOM_OPS_KERNELS_SELECT_ARGS_H_

#include <string>
#include <vector>

#include "custom_ops/core/cpu/common.h"
#include "custom_ops/core/cpu/select.h"
#include "custom_ops/core/cpu/sum_messages.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {

// The attributes `selectors` and `quantized`.
struct TensorAttributes {
  std::vector<Selector> selectors;
  std::vector<bool> quantized;

  tensorflow::Status Read(tensorflow::OpKernelConstruction* context);
};

// The attributes of what accumulates gradients.
struct MomentumAttributes {
  Momentum momentum;
  float factor;  // Of the momentum.
  bool masking;

  tensorflow::Status Read(tensorflow::OpKernelConstruction* context);
};

// The attributes of RedsyncAccumulateAndSelect.
struct SelectAttributes : TensorAttributes, MomentumAttributes {
  tensorflow::Status Read(tensorflow::OpKernelConstruction* context);
};

inline bool IsBfloat16(const tensorflow::Tensor& tensor) {
  return tensor.dtype() == tensorflow::DT_BFLOAT16;
}

// The inputs that are accumulated; gradients are of float or of bfloat16.
struct AccumulateInputs {
  tensorflow::OpInputList grads, residuals, velocities;
  const tensorflow::Tensor* scale;

  // Reads and checks all but the value of `scale`, which may be on a device.
  tensorflow::Status Read(tensorflow::OpKernelContext* context,
                          const MomentumAttributes& attributes);

  // What AccumulateAndSelect() needs to know of tensor `i`, but for what is selected of it.
  void Set(int i, const MomentumAttributes& attributes,
           const std::vector<tensorflow::Tensor*>& new_residuals,
           const std::vector<tensorflow::Tensor*>& new_velocities, SelectOptions* options,
           SelectBuffers* buffers) const;
};

// The inputs of RedsyncAccumulateAndSelect, and the parts of its message.
struct SelectInputs : AccumulateInputs {
  const tensorflow::Tensor *k, *ratios, *side, *search;
  std::vector<Part> parts;

  // Reads and checks all but the values of ratios, side and search, which may be on a device.
  tensorflow::Status Read(tensorflow::OpKernelContext* context, const SelectAttributes& attributes);
};

// The parts of a message, one per tensor of `tensors`; checks `k`, and that positions can be sent.
tensorflow::Status MakeParts(const TensorAttributes& attributes, const std::string& name,
                             const tensorflow::OpInputList& tensors, const tensorflow::Tensor& k,
                             std::vector<Part>* parts);

// Words of a message with these parts.
inline int64_t MessageWords(const std::vector<Part>& parts) {
  return parts.empty() ? kFlagWords : parts.back().offset + parts.back().words();
}

// TensorFlow's own intra-op threads.
ParallelFor IntraOpThreads(tensorflow::OpKernelContext* context);

// The input called `name`, a scalar.
tensorflow::Status Scalar(tensorflow::OpKernelContext* context, const char* name,
                          const tensorflow::Tensor** tensor);

// Whether `tensors` has the shapes of `grads`, one by one.
tensorflow::Status CheckShapes(const char* name, const tensorflow::OpInputList& tensors,
                               const tensorflow::OpInputList& grads);

// Outputs that reuse the memory of an input of equal place in one of the lists `inputs`, the first
// that nothing else needs.
tensorflow::Status Forward(tensorflow::OpKernelContext* context,
                           const std::vector<const char*>& inputs, const char* output,
                           std::vector<tensorflow::Tensor*>* tensors);

// Allocates, or forwards, `new_residuals` and `new_velocities`. In training the old state is held
// by variables, so that a step that is not finite can leave it as it was; gradients are done with.
tensorflow::Status NewState(tensorflow::OpKernelContext* context,
                            std::vector<tensorflow::Tensor*>* new_residuals,
                            std::vector<tensorflow::Tensor*>* new_velocities);

// What RedsyncDescend checks alike on all devices, but for the values of the indices.
tensorflow::Status CheckDescend(const tensorflow::Tensor& indices, const tensorflow::Tensor& values,
                                const tensorflow::Tensor& learning_rate);

// Says what is wrong with a received message, as DecodeError and RedsyncGpuError name it.
tensorflow::Status InvalidMessage(const std::string& field, int64_t tensor, int64_t rank,
                                  int64_t slot, int64_t value, int64_t limit);

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_KERNELS_SELECT_ARGS_H_
