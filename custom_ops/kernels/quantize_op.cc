#include <algorithm>

#include "custom_ops/core/cpu/quantize.h"
#include "custom_ops/kernels/call_op.h"
#include "custom_ops/kernels/op_support.h"
#include "custom_ops/kernels/quantize_args.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpKernelContext;

// Checks the scales of tensor `i` and copies them into the message.
tensorflow::Status SendScales(const QuantizeCall& call, int i, const float* scales) {
  const int64_t size = call.sizes[i], count = call.format.scales(size);
  CodecError error;
  if (CheckScales(call.format, scales, size, false, &error) != Status::kOk) {
    error.tensor = i;
    return Describe("scales", error);
  }
  int32_t* sent = call.message + call.scale_offsets[i];
  std::fill_n(sent, count, 0);
  if (size > 0) std::transform(scales, scales + count, sent, BitsOf);
  return tensorflow::OkStatus();
}

tensorflow::Status Quantize(OpKernelContext* context, const QuantizeCall& call) {
  const RandomStream stream = {static_cast<uint32_t>(call.stream[0]),
                               static_cast<uint32_t>(call.stream[1]),
                               static_cast<uint32_t>(call.stream[2])};
  bool finite = true;
  for (int i = 0; i < call.count(); ++i) {
    const float* scales = call.scales_in + call.scale_offsets[i] - kHeaderWords;
    TF_RETURN_IF_ERROR(SendScales(call, i, scales));
    finite &= QuantizeTensor(call.format, call.tensors[i], scales, call.sizes[i], stream, i,
                             IntraOpThreads(context), call.message + call.code_offsets[i],
                             call.errors[i]);
  }
  call.message[0] = finite;
  if (!finite) std::fill(call.message, call.message + call.words, 0);
  return tensorflow::OkStatus();
}

// Checks the flags and the scales of all messages.
tensorflow::Status CheckMessages(const DequantizeSumCall& call) {
  for (int64_t rank = 0; rank < call.ranks; ++rank) {
    const int32_t* row = call.messages + rank * call.words;
    CodecError error;
    error.rank = rank;
    if (row[0] != 0 && row[0] != 1) {
      Fail("flag", 0, row[0], 1, nullptr, &error);
      return Describe("messages", error);
    }
    for (int i = 0; i < call.count() && row[0] == 1; ++i) {
      const auto* scales = reinterpret_cast<const float*>(row + call.scale_offsets[i]);
      if (CheckScales(call.format, scales, call.sizes[i], true, &error) != Status::kOk) {
        error.tensor = i;
        return Describe("messages", error);
      }
    }
  }
  return tensorflow::OkStatus();
}

tensorflow::Status SumQuantized(OpKernelContext* context, const DequantizeSumCall& call) {
  TF_RETURN_IF_ERROR(CheckMessages(call));
  for (int i = 0; i < call.count(); ++i) {
    const QuantizedTensor tensor = {call.messages,         call.ranks,           call.words,
                                    call.scale_offsets[i], call.code_offsets[i], call.sizes[i]};
    CodecError error;
    const Status status =
        DequantizeSum(call.format, tensor, IntraOpThreads(context), call.totals[i], &error);
    error.tensor = i;
    TF_RETURN_IF_ERROR(StatusOf(status, "messages", error));
  }
  return tensorflow::OkStatus();
}

REGISTER_KERNEL_BUILDER(Name("RedsyncQuantize").Device(tensorflow::DEVICE_CPU),
                        CallOp<QuantizeCall, Quantize>);
REGISTER_KERNEL_BUILDER(Name("RedsyncDequantizeSum").Device(tensorflow::DEVICE_CPU),
                        CallOp<DequantizeSumCall, SumQuantized>);

}  // namespace
}  // namespace redsync
