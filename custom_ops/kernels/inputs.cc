#include "custom_ops/kernels/inputs.h"

namespace redsync {

using ::tensorflow::OpInputList;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::errors::InvalidArgument;

tensorflow::Status Scalar(OpKernelContext* context, const char* name, const Tensor** tensor) {
  TF_RETURN_IF_ERROR(context->input(name, tensor));
  if ((*tensor)->dims() == 0) return tensorflow::OkStatus();
  return InvalidArgument("`", name, "` must be a scalar. Received: shape ",
                         (*tensor)->shape().DebugString(), ".");
}

tensorflow::Status CheckShapes(const char* name, const OpInputList& tensors,
                               const OpInputList& grads) {
  if (tensors.size() != grads.size()) {
    return InvalidArgument("`", name,
                           "` must have one tensor per gradient. Received: ", tensors.size(), " ",
                           name, ", ", grads.size(), " grads.");
  }
  for (int i = 0; i < grads.size(); ++i) {
    if (tensors[i].shape() == grads[i].shape()) continue;
    return InvalidArgument("`", name, "` must have the shapes of `grads`. Received: ", name, "[", i,
                           "] of shape ", tensors[i].shape().DebugString(), " and grads[", i,
                           "] of shape ", grads[i].shape().DebugString(), ".");
  }
  return tensorflow::OkStatus();
}

tensorflow::Status Forward(OpKernelContext* context, const char* input, const char* output,
                           std::vector<Tensor*>* tensors) {
  int begin, end, output_begin, output_end;
  TF_RETURN_IF_ERROR(context->op_kernel().InputRange(input, &begin, &end));
  TF_RETURN_IF_ERROR(context->op_kernel().OutputRange(output, &output_begin, &output_end));
  tensors->resize(end - begin);
  for (int i = 0; i < end - begin; ++i) {
    TF_RETURN_IF_ERROR(context->forward_input_or_allocate_output(
        {begin + i}, output_begin + i, context->input(begin + i).shape(), &(*tensors)[i]));
  }
  return tensorflow::OkStatus();
}

tensorflow::Status CheckDescend(const Tensor& indices, const Tensor& values,
                                const Tensor& learning_rate) {
  if (indices.dims() != 1 || indices.shape() != values.shape()) {
    return InvalidArgument("`indices` and `values` must have the same shape [entries]. Received: ",
                           indices.shape().DebugString(), " and ", values.shape().DebugString(),
                           ".");
  }
  if (learning_rate.dims() != 0) {
    return InvalidArgument("`learning_rate` must be a scalar. Received: shape ",
                           learning_rate.shape().DebugString(), ".");
  }
  return tensorflow::OkStatus();
}

}  // namespace redsync
