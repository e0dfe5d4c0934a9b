#include "custom_ops/core/cpu/sum_messages.h"
#include "custom_ops/kernels/call_op.h"
#include "custom_ops/kernels/op_support.h"
#include "custom_ops/kernels/select_args.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpKernelContext;

// Checks the messages and sums them, tensor by tensor.
tensorflow::Status Decode(OpKernelContext* context, const DecodeCall& call) {
  const Messages messages = {call.messages, call.ranks, call.words()};
  const auto n = static_cast<int64_t>(call.parts.size());
  DecodeError error;
  if (Validate(messages, call.parts.data(), n, &error) != Status::kOk) {
    return InvalidMessage(error.field, error.tensor, error.rank, error.slot, error.value,
                          error.limit);
  }
  const ParallelFor threads = IntraOpThreads(context);
  for (int64_t i = 0; i < n; ++i) SumMessages(messages, call.parts[i], threads, call.totals[i]);
  return tensorflow::OkStatus();
}

REGISTER_KERNEL_BUILDER(Name("RedsyncDecode").Device(tensorflow::DEVICE_CPU),
                        CallOp<DecodeCall, Decode>);

}  // namespace
}  // namespace redsync
