// What the kernels of checksums share.
#ifndef TF_REDSYNC_CUSTOM_OPS_KERNELS_CHECKSUM_ARGS_H_
#define TF_REDSYNC_CUSTOM_OPS_KERNELS_CHECKSUM_ARGS_H_

#include "custom_ops/core/message_layout.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {

// Checks the shape of the messages, and gives the output their memory if nothing else needs that.
inline tensorflow::Status AllocateMessages(tensorflow::OpKernelContext* context,
                                           tensorflow::Tensor** messages) {
  const tensorflow::Tensor& input = context->input(0);
  if (input.dims() != 2 || input.dim_size(1) < kFlagWords) {
    return tensorflow::errors::InvalidArgument(
        "`messages` must have shape [rows, words], with at least the flag. ",
        "Received: ", input.shape().DebugString(), ".");
  }
  return context->forward_input_or_allocate_output({0}, 0, input.shape(), messages);
}

inline tensorflow::Status ChangedMessage(int64_t words, int32_t receiver, int32_t sender) {
  return tensorflow::errors::InvalidArgument(
      "a message arrived changed: its checksum is not that of its ", words,
      " words. Received by worker ", receiver, " from worker ", sender,
      ". The memory or the network of one of them is at fault. Start again from the last "
      "checkpoint, without that machine if it happens again.");
}

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_KERNELS_CHECKSUM_ARGS_H_
