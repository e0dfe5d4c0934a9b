// Attributes, input and outputs of RedsyncChunkedTopK; see call_op.h.
#ifndef TF_REDSYNC_CUSTOM_OPS_KERNELS_CHUNKS_ARGS_H_
#define TF_REDSYNC_CUSTOM_OPS_KERNELS_CHUNKS_ARGS_H_

#include "custom_ops/kernels/op_support.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {

struct ChunkedTopKCall {
  int64_t k = 0;
  int64_t number = 0, size = 0;  // Number and size of the chunks.
  const float* chunks = nullptr;
  int32_t* positions = nullptr;
  float* values = nullptr;

  tensorflow::Status ReadAttributes(tensorflow::OpKernelConstruction* context) {
    return ReadInt(context, "k", 0, INT32_MAX, &k);
  }

  tensorflow::Status Prepare(tensorflow::OpKernelContext* context) {
    const tensorflow::Tensor& input = context->input(0);
    if (input.dims() != 2) {
      return tensorflow::errors::InvalidArgument(
          "`chunks` must have shape [chunks, size]. Received: ", input.shape().DebugString(), ".");
    }
    number = input.dim_size(0);
    size = input.dim_size(1);
    if (k > size || size > INT32_MAX || number > INT32_MAX) {
      return tensorflow::errors::InvalidArgument(
          "`k` must be at most the size of a chunk, which is less than 2^31, as is the number of "
          "chunks. Received: k=",
          k, ", ", number, " chunks of size ", size, ".");
    }
    const tensorflow::TensorShape shape({number, k});
    TF_RETURN_IF_ERROR(AllocateOutput(context, "positions", shape, &positions));
    TF_RETURN_IF_ERROR(AllocateOutput(context, "values", shape, &values));
    chunks = input.flat<float>().data();
    return tensorflow::OkStatus();
  }
};

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_KERNELS_CHUNKS_ARGS_H_
