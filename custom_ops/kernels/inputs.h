// Checks of inputs and allocation of outputs that the kernels for CPU and GPU share.
#ifndef TF_REDSYNC_CUSTOM_OPS_KERNELS_INPUTS_H_
#define TF_REDSYNC_CUSTOM_OPS_KERNELS_INPUTS_H_

#include <vector>

#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {

// The input called `name`, a scalar.
tensorflow::Status Scalar(tensorflow::OpKernelContext* context, const char* name,
                          const tensorflow::Tensor** tensor);

// Whether `tensors` has the shapes of `grads`, one by one.
tensorflow::Status CheckShapes(const char* name, const tensorflow::OpInputList& tensors,
                               const tensorflow::OpInputList& grads);

// Outputs that reuse the memory of their inputs if nothing else needs it.
tensorflow::Status Forward(tensorflow::OpKernelContext* context, const char* input,
                           const char* output, std::vector<tensorflow::Tensor*>* tensors);

// What RedsyncDescend checks alike on all devices, but for the values of the indices.
tensorflow::Status CheckDescend(const tensorflow::Tensor& indices, const tensorflow::Tensor& values,
                                const tensorflow::Tensor& learning_rate);

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_KERNELS_INPUTS_H_
