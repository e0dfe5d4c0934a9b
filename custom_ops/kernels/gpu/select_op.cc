#include "custom_ops/kernels/call_op.h"
#include "custom_ops/kernels/gpu/select_call.h"
#include "custom_ops/kernels/select_args.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

static_assert(static_cast<int>(Selector::kExact) == REDSYNC_GPU_EXACT &&
                  static_cast<int>(Selector::kTrimmed) == REDSYNC_GPU_TRIMMED &&
                  static_cast<int>(Selector::kThreshold) == REDSYNC_GPU_THRESHOLD &&
                  static_cast<int>(Selector::kFixed) == REDSYNC_GPU_FIXED &&
                  static_cast<int>(Momentum::kNone) == REDSYNC_GPU_NO_MOMENTUM &&
                  static_cast<int>(Momentum::kPlain) == REDSYNC_GPU_MOMENTUM &&
                  static_cast<int>(Momentum::kNesterov) == REDSYNC_GPU_NESTEROV,
              "the codes of the C interface");

// Only the input `k` is in host memory: it determines the length of the message, and in a graph it
// is a constant or depends on constants only. A graph may compute the scalars on the device, so
// reading them on the host would wait for the device.
tensorflow::Status AccumulateAndSelectAll(tensorflow::OpKernelContext* context,
                                          const SelectCall& from) {
  GpuSelection selection(from);
  for (size_t i = 0; i < from.parts.size(); ++i) {
    RedsyncGpuTensor& t = selection.tensors[i];
    t.k = from.parts[i].capacity;
    t.selector = static_cast<int32_t>(from.selectors[i]);
    t.quantized = from.parts[i].quantized;
  }
  RedsyncGpuSelect& call = selection.call;
  call.side = from.side->scalar<int32_t>().data();
  call.search = reinterpret_cast<const uint8_t*>(from.search->scalar<bool>().data());
  call.ratios = from.ratios->flat<float>().data();
  call.new_ratios = from.new_ratios;
  call.message = from.message;
  if (redsync_gpu_message_words(&call) != from.words()) {
    return tensorflow::errors::Internal("The layouts of CPU and GPU differ.");
  }
  return selection.Queue(context);
}

REGISTER_KERNEL_BUILDER(
    Name("RedsyncAccumulateAndSelect").Device(tensorflow::DEVICE_GPU).HostMemory("k"),
    CallOp<SelectCall, AccumulateAndSelectAll>);

}  // namespace
}  // namespace redsync
