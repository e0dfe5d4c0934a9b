#include <atomic>
#include <vector>

#include "custom_ops/kernels/gpu/select_call.h"
#include "custom_ops/kernels/select_args.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;

static_assert(static_cast<int>(Selector::kExact) == REDSYNC_GPU_EXACT &&
                  static_cast<int>(Selector::kTrimmed) == REDSYNC_GPU_TRIMMED &&
                  static_cast<int>(Selector::kThreshold) == REDSYNC_GPU_THRESHOLD &&
                  static_cast<int>(Selector::kFixed) == REDSYNC_GPU_FIXED &&
                  static_cast<int>(Momentum::kNone) == REDSYNC_GPU_NO_MOMENTUM &&
                  static_cast<int>(Momentum::kPlain) == REDSYNC_GPU_MOMENTUM &&
                  static_cast<int>(Momentum::kNesterov) == REDSYNC_GPU_NESTEROV,
              "the codes of the C interface");

// Validates, allocates and queues redsync_gpu_select(). Of the inputs only `k` is in host memory:
// it decides the length of the message, and in a graph it is a constant, or follows from one. The
// scalars may be computed on the device, and to read them here would be to wait for it.
class GpuAccumulateAndSelectOp : public tensorflow::OpKernel {
 public:
  explicit GpuAccumulateAndSelectOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, attributes_.Read(context));
  }

  void Compute(OpKernelContext* context) override {
    SelectInputs in;
    OP_REQUIRES_OK(context, in.Read(context, attributes_));
    const std::vector<Part>& parts = in.parts;
    Tensor *message, *new_ratios;
    std::vector<Tensor*> new_residuals, new_velocities;
    OP_REQUIRES_OK(
        context, context->allocate_output("message", TensorShape({MessageWords(parts)}), &message));
    OP_REQUIRES_OK(context,
                   context->allocate_output("new_ratios", in.ratios->shape(), &new_ratios));
    OP_REQUIRES_OK(context, NewState(context, &new_residuals, &new_velocities));

    GpuSelection selection(in, attributes_, new_residuals, new_velocities,
                           calls_.fetch_add(1, std::memory_order_relaxed));
    for (size_t i = 0; i < parts.size(); ++i) {
      RedsyncGpuTensor& t = selection.tensors[i];
      t.k = in.k->flat<int32_t>()(i);
      t.selector = static_cast<int32_t>(attributes_.selectors[i]);
      t.quantized = parts[i].quantized;
    }
    RedsyncGpuSelect& call = selection.call;
    call.side = in.side->scalar<int32_t>().data();
    call.search = reinterpret_cast<const uint8_t*>(in.search->scalar<bool>().data());
    call.ratios = in.ratios->flat<float>().data();
    call.new_ratios = new_ratios->flat<float>().data();
    call.message = message->flat<int32_t>().data();
    OP_REQUIRES(context, redsync_gpu_message_words(&call) == message->NumElements(),
                tensorflow::errors::Internal("The layouts of CPU and GPU differ."));
    OP_REQUIRES_OK(context, selection.Queue(context));
  }

 private:
  SelectAttributes attributes_;
  std::atomic<uint32_t> calls_{0};
};

REGISTER_KERNEL_BUILDER(
    Name("RedsyncAccumulateAndSelect").Device(tensorflow::DEVICE_GPU).HostMemory("k"),
    GpuAccumulateAndSelectOp);

}  // namespace
}  // namespace redsync
