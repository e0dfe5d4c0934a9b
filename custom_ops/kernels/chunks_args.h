// What the kernels of top-k in chunks share.
#ifndef TF_REDSYNC_CUSTOM_OPS_KERNELS_CHUNKS_ARGS_H_
#define TF_REDSYNC_CUSTOM_OPS_KERNELS_CHUNKS_ARGS_H_

#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {

// Arguments and outputs of a call.
struct ChunkedTopK {
  int64_t number, size, k;
  const float* chunks;
  int32_t* positions;
  float* values;

  // Checks the arguments, and allocates the outputs.
  tensorflow::Status Read(tensorflow::OpKernelContext* context, int64_t given_k) {
    const tensorflow::Tensor& input = context->input(0);
    if (input.dims() != 2) {
      return tensorflow::errors::InvalidArgument(
          "`chunks` must have shape [chunks, size]. Received: ", input.shape().DebugString(), ".");
    }
    number = input.dim_size(0);
    size = input.dim_size(1);
    k = given_k;
    if (k > size || size > INT32_MAX || number > INT32_MAX) {
      return tensorflow::errors::InvalidArgument(
          "`k` must be at most the size of a chunk, which is less than 2^31, as is the number of "
          "chunks. Received: k=",
          k, ", ", number, " chunks of size ", size, ".");
    }
    tensorflow::Tensor *at, *of;
    const tensorflow::TensorShape shape({number, k});
    TF_RETURN_IF_ERROR(context->allocate_output("positions", shape, &at));
    TF_RETURN_IF_ERROR(context->allocate_output("values", shape, &of));
    chunks = input.flat<float>().data();
    positions = at->flat<int32_t>().data();
    values = of->flat<float>().data();
    return tensorflow::OkStatus();
  }
};

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_KERNELS_CHUNKS_ARGS_H_
