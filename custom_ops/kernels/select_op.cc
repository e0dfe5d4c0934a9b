#include <algorithm>

#include "custom_ops/core/cpu/select.h"
#include "custom_ops/kernels/call_op.h"
#include "custom_ops/kernels/cpu_select.h"
#include "custom_ops/kernels/select_args.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpKernelContext;
using ::tensorflow::errors::InvalidArgument;

// Checks the values of inputs, which are in host memory on a CPU.
tensorflow::Status CheckValues(const SelectCall& call) {
  const int32_t sign = call.side->scalar<int32_t>()();
  const bool any_quantized = std::count(call.quantized.begin(), call.quantized.end(), true) > 0;
  if (any_quantized && sign != 1 && sign != -1) {
    return InvalidArgument("`side` must be +1 or -1. Received: side=", sign, ".");
  }
  for (size_t i = 0; i < call.parts.size(); ++i) {
    const float ratio = call.ratios->flat<float>()(i);
    if (call.selectors[i] == Selector::kFixed && ratio < 0) {
      return InvalidArgument(
          "`ratios` must be >= 0 where the selector is 'fixed': they are the thresholds. "
          "Received: ratios[",
          i, "]=", ratio, ".");
    }
  }
  return tensorflow::OkStatus();
}

tensorflow::Status AccumulateAndSelectAll(OpKernelContext* context, const SelectCall& call) {
  TF_RETURN_IF_ERROR(CheckValues(call));
  const int64_t n = static_cast<int64_t>(call.parts.size()), words = call.words();
  const float* ratios = call.ratios->flat<float>().data();
  TensorSelector selector(context, call);
  int64_t bytes = 0;
  for (int64_t i = 0; i < n; ++i) {
    const Part& part = call.parts[i];
    bytes = std::max(bytes, SelectScratchBytes(part.size, part.capacity, call.selectors[i]));
  }
  TF_RETURN_IF_ERROR(selector.Allocate(context, bytes));
  int32_t* message = call.message;
  std::fill(message, message + words, 0);
  bool finite = true;
  for (int64_t i = 0; i < n; ++i) {
    const Part& part = call.parts[i];
    SelectOptions options;
    SelectBuffers buffers;
    options.k = part.capacity;
    options.selector = call.selectors[i];
    options.quantized = part.quantized;
    options.positive_side = call.side->scalar<int32_t>()() > 0;
    options.search = call.search->scalar<bool>()();
    options.ratio = ratios[i];
    buffers.indices = const_cast<uint32_t*>(part.indices(message));
    if (!part.quantized) buffers.values = const_cast<int32_t*>(part.values(message));
    SelectResult result;
    TF_RETURN_IF_ERROR(selector.Select(static_cast<int>(i), options, buffers, &result));
    finite = finite && result.finite;
    message[part.offset] = static_cast<int32_t>(result.count);
    if (part.quantized) *const_cast<int32_t*>(part.values(message)) = BitsOf(result.mean);
    call.new_ratios[i] = result.ratio;
  }
  message[0] = 1;
  if (!finite) {
    std::fill(message, message + words, 0);
    std::copy_n(ratios, n, call.new_ratios);
  }
  return tensorflow::OkStatus();
}

REGISTER_KERNEL_BUILDER(Name("RedsyncAccumulateAndSelect").Device(tensorflow::DEVICE_CPU),
                        CallOp<SelectCall, AccumulateAndSelectAll>);

}  // namespace
}  // namespace redsync
