// Inputs and outputs of RedsyncSeal and RedsyncOpen; see call_op.h.
#ifndef TF_REDSYNC_CUSTOM_OPS_KERNELS_CHECKSUM_ARGS_H_
#define TF_REDSYNC_CUSTOM_OPS_KERNELS_CHECKSUM_ARGS_H_

#include "custom_ops/core/message_layout.h"
#include "custom_ops/kernels/op_support.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {

struct SealCall {
  int64_t rows = 0, words = 0;
  const uint32_t* in = nullptr;
  uint32_t* out = nullptr;  // May be `in`.

  tensorflow::Status ReadAttributes(tensorflow::OpKernelConstruction*) {
    return tensorflow::OkStatus();
  }

  tensorflow::Status Prepare(tensorflow::OpKernelContext* context) {
    const tensorflow::Tensor& messages = context->input(0);
    if (messages.dims() != 2 || messages.dim_size(1) < kHeaderWords) {
      return tensorflow::errors::InvalidArgument(
          "`messages` must have shape [rows, words], with at least the flag. ",
          "Received: ", messages.shape().DebugString(), ".");
    }
    rows = messages.dim_size(0);
    words = messages.dim_size(1);
    in = Words(messages);
    tensorflow::Tensor* output;
    TF_RETURN_IF_ERROR(
        context->forward_input_or_allocate_output({0}, 0, messages.shape(), &output));
    out = Words(output);
    return tensorflow::OkStatus();
  }
};

struct OpenCall : SealCall {
  const int32_t* senders = nullptr;   // [rows]; below 0: no sender, the row is unchanged.
  const int32_t* receiver = nullptr;  // Scalar, in host memory.

  tensorflow::Status Prepare(tensorflow::OpKernelContext* context) {
    const tensorflow::Tensor &ranks = context->input(1), *rank;
    TF_RETURN_IF_ERROR(SealCall::Prepare(context));
    TF_RETURN_IF_ERROR(CheckVector("senders", ranks, rows));
    TF_RETURN_IF_ERROR(ReadScalar(context, "receiver", &rank));
    senders = ranks.flat<int32_t>().data();
    receiver = rank->scalar<int32_t>().data();
    return tensorflow::OkStatus();
  }

  // Returns the error for a message from `sender` with a wrong checksum.
  tensorflow::Status Corrupted(int32_t sender) const {
    return tensorflow::errors::InvalidArgument(
        "received a corrupted message: the checksum does not match its ", words,
        " words. Received by worker ", *receiver, " from worker ", sender,
        ". The memory or the network of one of them is faulty. Restart from the last checkpoint, "
        "without that machine if the error recurs.");
  }
};

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_KERNELS_CHECKSUM_ARGS_H_
