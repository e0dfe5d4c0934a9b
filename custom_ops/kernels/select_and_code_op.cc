#include <algorithm>
#include <vector>

#include "custom_ops/core/cpu/select.h"
#include "custom_ops/core/cpu/topk_codec.h"
#include "custom_ops/kernels/call_op.h"
#include "custom_ops/kernels/cpu_select.h"
#include "custom_ops/kernels/op_support.h"
#include "custom_ops/kernels/topk_args.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;

constexpr int64_t kSlotCost = 16;  // Cycles to decode a slot.

// Selects tensor by tensor, and then encodes the selected elements of all tensors.
tensorflow::Status SelectAndCode(OpKernelContext* context, SelectAndCodeCall& call) {
  TensorSelector selector(context, call);
  int64_t bytes = 0;
  for (const TopKTensor& tensor : call.tensors) {
    bytes = std::max(bytes, SelectScratchBytes(tensor.size, tensor.slots, Selector::kExact));
  }
  TF_RETURN_IF_ERROR(selector.Allocate(context, bytes));
  Tensor all_indices, all_values, codes;
  for (Tensor* buffer : {&all_indices, &all_values, &codes}) {
    TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_INT32,
                                              tensorflow::TensorShape({call.slots}), buffer));
  }
  uint32_t* indices = Words(&all_indices);
  int32_t* values = all_values.flat<int32_t>().data();
  bool finite = true;
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    TopKTensor& tensor = call.tensors[i];
    SelectOptions options;
    SelectBuffers buffers;
    options.k = tensor.slots;
    options.adam = call.AdamOf(i);
    options.clear_residual = false;  // EncodeTopK() stores the coding errors there.
    tensor.indices = buffers.indices = indices;
    tensor.values = buffers.values = values;
    SelectResult result;
    TF_RETURN_IF_ERROR(selector.Select(static_cast<int>(i), options, buffers, &result));
    tensor.count = result.count;
    finite = finite && result.finite;
    indices += tensor.slots;
    values += tensor.slots;
  }
  if (!finite) {
    std::fill(call.message, call.message + call.words, 0);
    return tensorflow::OkStatus();
  }
  CodecError error;
  const Status status =
      EncodeTopK(call.format, call.tensors.data(), static_cast<int64_t>(call.tensors.size()),
                 Words(&codes), call.message, &error);
  return StatusOf(status, "indices", error);
}

// Decodes the messages of all workers.
tensorflow::Status DecodeMessages(OpKernelContext* context, const DecodeTopKCall& call) {
  std::vector<CodecError> errors(call.ranks);
  IntraOpThreads(context)(call.ranks, kSlotCost * call.slots, [&](int64_t first, int64_t last) {
    std::vector<uint32_t> scratch(call.slots);
    for (int64_t rank = first; rank < last; ++rank) {
      DecodeTopK(call.format, call.tensors.data(), static_cast<int64_t>(call.tensors.size()),
                 call.messages + rank * call.words, scratch.data(),
                 call.plain + rank * call.plain_words, &errors[rank]);
      errors[rank].rank = rank;
    }
  });
  return FirstError("messages", errors);
}

REGISTER_KERNEL_BUILDER(Name("RedsyncSelectAndCode").Device(tensorflow::DEVICE_CPU),
                        CallOp<SelectAndCodeCall, SelectAndCode>);
REGISTER_KERNEL_BUILDER(Name("RedsyncUncode").Device(tensorflow::DEVICE_CPU),
                        CallOp<DecodeTopKCall, DecodeMessages>);

}  // namespace
}  // namespace redsync
