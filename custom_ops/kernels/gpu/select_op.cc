#include <cmath>
#include <vector>

#include "custom_ops/kernels/gpu/stream.h"
#include "custom_ops/kernels/layout.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpInputList;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;
using ::tensorflow::errors::InvalidArgument;

static_assert(static_cast<int>(Selector::kExact) == REDSYNC_GPU_EXACT &&
                  static_cast<int>(Selector::kTrimmed) == REDSYNC_GPU_TRIMMED &&
                  static_cast<int>(Selector::kThreshold) == REDSYNC_GPU_THRESHOLD,
              "the codes of the C interface");

// Validates, allocates and queues redsync_gpu_select(). Of the inputs only `k` is in host memory:
// it decides the length of the message, and in a graph it is a constant, or follows from one. The
// scalars may be computed on the device, and to read them here would be to wait for it.
class GpuAccumulateAndSelectOp : public tensorflow::OpKernel {
 public:
  explicit GpuAccumulateAndSelectOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, attributes_.Read(context));
    OP_REQUIRES_OK(context, context->GetAttr("momentum", &factor_));
    OP_REQUIRES_OK(context, context->GetAttr("nesterov", &nesterov_));
    OP_REQUIRES_OK(context, context->GetAttr("masking", &masking_));
    OP_REQUIRES(
        context, std::isfinite(factor_) && factor_ >= 0,
        InvalidArgument("`momentum` must be finite and >= 0. Received: momentum=", factor_, "."));
  }

  void Compute(OpKernelContext* context) override {
    OpInputList grads, residuals, velocities;
    const Tensor *k, *ratios, *scale, *side, *search;
    OP_REQUIRES_OK(context, context->input_list("grads", &grads));
    OP_REQUIRES_OK(context, context->input_list("residuals", &residuals));
    OP_REQUIRES_OK(context, context->input_list("velocities", &velocities));
    OP_REQUIRES_OK(context, context->input("k", &k));
    OP_REQUIRES_OK(context, context->input("ratios", &ratios));
    OP_REQUIRES_OK(context, Scalar(context, "scale", &scale));
    OP_REQUIRES_OK(context, Scalar(context, "side", &side));
    OP_REQUIRES_OK(context, Scalar(context, "search", &search));
    OP_REQUIRES(context, ratios->dims() == 1 && ratios->NumElements() == grads.size(),
                InvalidArgument("`ratios` must have shape [", grads.size(),
                                "]. Received: ", ratios->shape().DebugString(), "."));
    OP_REQUIRES_OK(context, CheckShapes("residuals", residuals, grads));
    if (factor_ != 0) OP_REQUIRES_OK(context, CheckShapes("velocities", velocities, grads));
    std::vector<Part> parts;
    OP_REQUIRES_OK(context, MakeParts(attributes_, "grads", grads, *k, &parts));

    Tensor *message, *new_ratios;
    std::vector<Tensor*> new_residuals, new_velocities;
    OP_REQUIRES_OK(
        context, context->allocate_output("message", TensorShape({MessageWords(parts)}), &message));
    OP_REQUIRES_OK(context, context->allocate_output("new_ratios", ratios->shape(), &new_ratios));
    OP_REQUIRES_OK(context, Forward(context, "residuals", "new_residuals", &new_residuals));
    OP_REQUIRES_OK(context, Forward(context, "velocities", "new_velocities", &new_velocities));

    std::vector<RedsyncGpuTensor> tensors(parts.size());
    for (size_t i = 0; i < parts.size(); ++i) {
      RedsyncGpuTensor& t = tensors[i];
      t = {};
      t.size = parts[i].size;
      t.k = k->flat<int32_t>()(i);
      t.selector = static_cast<int32_t>(attributes_.selectors[i]);
      t.quantized = parts[i].quantized;
      t.grad = grads[i].flat<float>().data();
      t.residual = residuals[i].flat<float>().data();
      t.new_residual = new_residuals[i]->flat<float>().data();
      if (factor_ == 0) continue;
      t.velocity = velocities[i].flat<float>().data();
      t.new_velocity = new_velocities[i]->flat<float>().data();
    }
    RedsyncGpuSelect call = {};
    call.tensors = tensors.data();
    call.count = tensors.size();
    call.momentum = factor_ == 0 ? REDSYNC_GPU_NO_MOMENTUM
                    : nesterov_  ? REDSYNC_GPU_NESTEROV
                                 : REDSYNC_GPU_MOMENTUM;
    call.masking = masking_;
    call.factor = factor_;
    call.scale = scale->scalar<float>().data();
    call.side = side->scalar<int32_t>().data();
    call.search = reinterpret_cast<const uint8_t*>(search->scalar<bool>().data());
    call.ratios = ratios->flat<float>().data();
    call.new_ratios = new_ratios->flat<float>().data();
    call.message = message->flat<int32_t>().data();
    OP_REQUIRES(context, redsync_gpu_message_words(&call) == message->NumElements(),
                tensorflow::errors::Internal("The layouts of CPU and GPU differ."));

    Tensor scratch;  // Freed for work that is queued later on the same stream.
    const int64_t bytes = redsync_gpu_select_scratch_bytes(&call);
    OP_REQUIRES_OK(context,
                   context->allocate_temp(tensorflow::DT_UINT8, TensorShape({bytes}), &scratch));
    OP_REQUIRES_OK(
        context,
        FromCode(redsync_gpu_select(&call, scratch.data(), bytes, StreamOf(context)), "Selection"));
  }

 private:
  TensorAttributes attributes_;
  float factor_;
  bool nesterov_;
  bool masking_;
};

REGISTER_KERNEL_BUILDER(
    Name("RedsyncAccumulateAndSelect").Device(tensorflow::DEVICE_GPU).HostMemory("k"),
    GpuAccumulateAndSelectOp);

}  // namespace
}  // namespace redsync
