// Attributes, inputs and outputs of the ops that select elements, and of those that decode or apply
// messages of selected elements; see call_op.h.
#ifndef TF_REDSYNC_CUSTOM_OPS_KERNELS_SELECT_ARGS_H_
#define TF_REDSYNC_CUSTOM_OPS_KERNELS_SELECT_ARGS_H_

#include <string>
#include <vector>

#include "custom_ops/core/cpu/common.h"
#include "custom_ops/core/cpu/select.h"
#include "custom_ops/core/cpu/sum_messages.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {

inline bool IsBfloat16(const tensorflow::Tensor& tensor) {
  return tensor.dtype() == tensorflow::DT_BFLOAT16;
}

// Checks the number of velocities: the inputs `M`, one per gradient with momentum or `adam`, and
// the outputs `U`, as many or, without `nesterov`, none. Also in shape functions.
template <class Context>
tensorflow::Status CheckVelocities(Context* context, bool adam = false) {
  int n, velocities, new_velocities;
  float momentum;
  bool nesterov;
  TF_RETURN_IF_ERROR(context->GetAttr("N", &n));
  TF_RETURN_IF_ERROR(context->GetAttr("M", &velocities));
  TF_RETURN_IF_ERROR(context->GetAttr("U", &new_velocities));
  TF_RETURN_IF_ERROR(context->GetAttr("momentum", &momentum));
  TF_RETURN_IF_ERROR(context->GetAttr("nesterov", &nesterov));
  if (velocities != (momentum == 0 && !adam ? 0 : n)) {
    return tensorflow::errors::InvalidArgument(
        "`velocities` must have one tensor per residual if momentum is used, and be empty without. "
        "Received: ",
        velocities, " velocities, ", n, " residuals, momentum=", momentum, ".");
  }
  if (new_velocities == velocities || (new_velocities == 0 && !nesterov && !adam)) {
    return tensorflow::OkStatus();
  }
  return tensorflow::errors::InvalidArgument(
      "`U`, the number of new velocities, must be that of `velocities`, or 0 without `nesterov` "
      "and "
      "`epsilon`. "
      "Received: U=",
      new_velocities, " for ", velocities, " velocities, nesterov=", nesterov, ".");
}

// Accumulation of float or bfloat16 gradients into residuals and velocities.
struct AccumulateCall {
  Momentum momentum = Momentum::kNone;
  float factor = 0;  // Momentum coefficient.
  bool masking = true;
  tensorflow::OpInputList grads, residuals, velocities;
  const tensorflow::Tensor* scale = nullptr;
  std::vector<tensorflow::Tensor*> new_residuals, new_velocities;

  // Reads `momentum`, `nesterov` and `masking`, and checks the numbers of velocities. With `adam`
  // the velocities are Adam's second moments.
  tensorflow::Status ReadAttributes(tensorflow::OpKernelConstruction* context, bool adam = false);
  // Reads and checks the inputs, except the value of `scale`, which may be on a device.
  tensorflow::Status ReadInputs(tensorflow::OpKernelContext* context);
  // Allocates `new_residuals` and `new_velocities`, in the buffer of an input if no other op needs
  // it. In training, variables reference the old state, which a skipped step keeps, so the buffers
  // of the gradients are reused.
  tensorflow::Status AllocateState(tensorflow::OpKernelContext* context);

  // Fills the arguments of AccumulateAndSelect() for tensor `i`, except those of the selection.
  void Set(int i, SelectOptions* options, SelectBuffers* buffers) const;
};

// The attribute `quantized`, and the resulting parts of a message.
struct PartsCall {
  std::vector<bool> quantized;
  std::vector<Part> parts;  // One for each tensor.

  tensorflow::Status ReadAttributes(tensorflow::OpKernelConstruction* context);
  // Computes the parts for the input list `name`; checks `k`, and that positions fit 32 bits.
  tensorflow::Status ComputeParts(const std::string& name, const tensorflow::OpInputList& tensors,
                                  const tensorflow::Tensor& k);

  int64_t words() const {
    return parts.empty() ? kHeaderWords : parts.back().offset + parts.back().words();
  }
};

// RedsyncAccumulateAndSelect.
struct SelectCall : AccumulateCall, PartsCall {
  std::vector<Selector> selectors;
  const tensorflow::Tensor *k = nullptr, *ratios = nullptr, *side = nullptr, *search = nullptr;
  int32_t* message = nullptr;
  float* new_ratios = nullptr;

  tensorflow::Status ReadAttributes(tensorflow::OpKernelConstruction* context);
  // Checks the inputs, except the values of ratios, side and search, which may be on a device.
  tensorflow::Status Prepare(tensorflow::OpKernelContext* context);
};

// RedsyncDecode.
struct DecodeCall : PartsCall {
  const int32_t* messages = nullptr;
  int64_t ranks = 0;
  std::vector<float*> totals;

  tensorflow::Status Prepare(tensorflow::OpKernelContext* context);
};

// Returns the error for a received message; the arguments are the fields of DecodeError and
// RedsyncGpuError.
tensorflow::Status InvalidMessage(const std::string& field, int64_t tensor, int64_t rank,
                                  int64_t slot, int64_t value, int64_t limit);

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_KERNELS_SELECT_ARGS_H_
