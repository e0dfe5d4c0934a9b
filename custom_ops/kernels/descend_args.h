// Inputs of RedsyncDescend, on all devices.
#ifndef TF_REDSYNC_CUSTOM_OPS_KERNELS_DESCEND_ARGS_H_
#define TF_REDSYNC_CUSTOM_OPS_KERNELS_DESCEND_ARGS_H_

#include "custom_ops/kernels/op_support.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {

// Inputs of the op. It is not a CallOp, because the variable must stay locked while the kernel runs
// or is queued.
struct DescendInputs {
  const uint32_t* indices = nullptr;
  const float* values = nullptr;
  const float* learning_rate = nullptr;
  int64_t entries = 0;

  // Checks only shapes, because the values may be on a device.
  tensorflow::Status Read(tensorflow::OpKernelContext* context) {
    const tensorflow::Tensor &at = context->input(1), &along = context->input(2), *rate;
    if (at.shape() != along.shape()) {
      return tensorflow::errors::InvalidArgument(
          "`indices` and `values` must have the same shape. Received: ", at.shape().DebugString(),
          " and ", along.shape().DebugString(), ".");
    }
    TF_RETURN_IF_ERROR(ReadScalar(context, "learning_rate", &rate));
    indices = reinterpret_cast<const uint32_t*>(at.flat<float>().data());
    values = along.flat<float>().data();
    learning_rate = rate->scalar<float>().data();
    entries = at.NumElements();
    return tensorflow::OkStatus();
  }

  static tensorflow::Status CheckVariable(const tensorflow::Tensor& tensor) {
    if (tensor.dtype() == tensorflow::DT_FLOAT && tensor.IsInitialized()) {
      return tensorflow::OkStatus();
    }
    return tensorflow::errors::InvalidArgument(
        "`variable` must be an initialized float32 variable.");
  }

  // Returns the error for indices[at] = `index`, which is out of range for `size` elements.
  static tensorflow::Status OutOfRange(int64_t size, int64_t at, int64_t index) {
    return tensorflow::errors::InvalidArgument("`indices` must be in [0, ", size,
                                               "). Received: indices[", at, "]=", index, ".");
  }
};

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_KERNELS_DESCEND_ARGS_H_
