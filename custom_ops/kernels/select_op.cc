#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "custom_ops/core/cpu/select.h"
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

// Validates, allocates and calls AccumulateAndSelect() for one tensor after the other.
class AccumulateAndSelectOp : public tensorflow::OpKernel {
 public:
  explicit AccumulateAndSelectOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, attributes_.Read(context));
    OP_REQUIRES_OK(context, context->GetAttr("momentum", &factor_));
    OP_REQUIRES_OK(context, context->GetAttr("nesterov", &nesterov_));
    OP_REQUIRES_OK(context, context->GetAttr("masking", &masking_));
    OP_REQUIRES(
        context, std::isfinite(factor_) && factor_ >= 0,
        InvalidArgument("`momentum` must be finite and >= 0. Received: momentum=", factor_, "."));
  }

  void Compute(OpKernelContext* context) override {
    Call call;
    OP_REQUIRES_OK(context, ReadInputs(context, &call));
    OP_REQUIRES_OK(context, Allocate(context, &call));
    int32_t* message = call.message->flat<int32_t>().data();
    std::fill(message, message + call.message->NumElements(), 0);
    bool finite = true;
    for (size_t i = 0; i < call.parts.size(); ++i) {
      OP_REQUIRES_OK(context, Select(context, i, message, &call, &finite));
    }
    message[0] = 1;
    if (!finite) {
      std::fill(message, message + call.message->NumElements(), 0);
      std::copy_n(call.ratios->flat<float>().data(), call.parts.size(),
                  call.new_ratios->flat<float>().data());
    }
  }

 private:
  // What one execution works on.
  struct Call {
    OpInputList grads, residuals, velocities;
    const Tensor* k;
    const Tensor* ratios;
    float scale;
    bool positive_side, search;
    std::vector<Part> parts;
    Tensor* message;
    std::vector<Tensor*> new_residuals, new_velocities;
    Tensor* new_ratios;
    Tensor scratch;
    ParallelFor threads;
  };

  tensorflow::Status ReadInputs(OpKernelContext* context, Call* call) const {
    const Tensor *scale, *side, *search;
    TF_RETURN_IF_ERROR(context->input_list("grads", &call->grads));
    TF_RETURN_IF_ERROR(context->input_list("residuals", &call->residuals));
    TF_RETURN_IF_ERROR(context->input_list("velocities", &call->velocities));
    TF_RETURN_IF_ERROR(context->input("k", &call->k));
    TF_RETURN_IF_ERROR(context->input("ratios", &call->ratios));
    TF_RETURN_IF_ERROR(Scalar(context, "scale", &scale));
    TF_RETURN_IF_ERROR(Scalar(context, "side", &side));
    TF_RETURN_IF_ERROR(Scalar(context, "search", &search));
    call->scale = scale->scalar<float>()();
    call->search = search->scalar<bool>()();
    const int32_t sign = side->scalar<int32_t>()();
    const bool any_quantized =
        std::count(attributes_.quantized.begin(), attributes_.quantized.end(), true) > 0;
    if (any_quantized && sign != 1 && sign != -1) {
      return InvalidArgument("`side` must be +1 or -1. Received: side=", sign, ".");
    }
    call->positive_side = sign > 0;
    if (call->ratios->dims() != 1 || call->ratios->NumElements() != call->grads.size()) {
      return InvalidArgument("`ratios` must have shape [", call->grads.size(),
                             "]. Received: ", call->ratios->shape().DebugString(), ".");
    }
    for (int i = 0; i < call->grads.size(); ++i) {
      const float ratio = call->ratios->flat<float>()(i);
      if (attributes_.selectors[i] == Selector::kFixed && ratio < 0) {
        return InvalidArgument(
            "`ratios` must be >= 0 where the selector is 'fixed': they are the thresholds. "
            "Received: ratios[",
            i, "]=", ratio, ".");
      }
    }
    TF_RETURN_IF_ERROR(CheckShapes("residuals", call->residuals, call->grads));
    if (factor_ != 0 || call->velocities.size() != 0) {
      TF_RETURN_IF_ERROR(CheckShapes("velocities", call->velocities, call->grads));
    }
    call->threads = IntraOpThreads(context);
    return MakeParts(attributes_, "grads", call->grads, *call->k, &call->parts);
  }

  tensorflow::Status Allocate(OpKernelContext* context, Call* call) const {
    const int64_t words = MessageWords(call->parts);
    TF_RETURN_IF_ERROR(context->allocate_output("message", TensorShape({words}), &call->message));
    TF_RETURN_IF_ERROR(
        context->allocate_output("new_ratios", call->ratios->shape(), &call->new_ratios));
    TF_RETURN_IF_ERROR(Forward(context, "residuals", "new_residuals", &call->new_residuals));
    TF_RETURN_IF_ERROR(Forward(context, "velocities", "new_velocities", &call->new_velocities));
    int64_t bytes = 0;
    for (size_t i = 0; i < call->parts.size(); ++i) {
      bytes = std::max(bytes, SelectScratchBytes(call->parts[i].size, call->k->flat<int32_t>()(i),
                                                 attributes_.selectors[i]));
    }
    return context->allocate_temp(tensorflow::DT_UINT8, TensorShape({bytes}), &call->scratch);
  }

  tensorflow::Status Select(OpKernelContext* context, int i, int32_t* message, Call* call,
                            bool* finite) const {
    const Part& part = call->parts[i];
    SelectOptions options;
    options.size = part.size;
    options.k = call->k->flat<int32_t>()(i);
    options.selector = attributes_.selectors[i];
    options.quantized = part.quantized;
    options.momentum = factor_ == 0 ? Momentum::kNone
                       : nesterov_  ? Momentum::kNesterov
                                    : Momentum::kPlain;
    options.factor = factor_;
    options.masking = masking_;
    options.scale = call->scale;
    options.positive_side = call->positive_side;
    options.search = call->search;
    options.ratio = call->ratios->flat<float>()(i);

    SelectBuffers buffers;
    buffers.grad = call->grads[i].flat<float>().data();
    buffers.residual = call->residuals[i].flat<float>().data();
    buffers.new_residual = call->new_residuals[i]->flat<float>().data();
    if (factor_ != 0) {
      buffers.velocity = call->velocities[i].flat<float>().data();
      buffers.new_velocity = call->new_velocities[i]->flat<float>().data();
    }
    buffers.indices = const_cast<int32_t*>(part.indices(message));
    if (!part.quantized) buffers.values = const_cast<int32_t*>(part.values(message));

    SelectResult result;
    const Status status = AccumulateAndSelect(options, buffers, call->scratch.data(),
                                              call->scratch.TotalBytes(), call->threads, &result);
    if (status != Status::kOk) {
      return tensorflow::errors::Internal("Selection failed with status ", static_cast<int>(status),
                                          " on grads[", i, "] of shape ",
                                          call->grads[i].shape().DebugString(), ".");
    }
    *finite = *finite && result.finite;
    message[part.offset] = result.count;
    if (part.quantized) message[part.offset + 1] = BitsOf(result.mean);
    call->new_ratios->flat<float>()(i) = result.ratio;
    return tensorflow::OkStatus();
  }

  TensorAttributes attributes_;
  float factor_;
  bool nesterov_;
  bool masking_;
};

REGISTER_KERNEL_BUILDER(Name("RedsyncAccumulateAndSelect").Device(tensorflow::DEVICE_CPU),
                        AccumulateAndSelectOp);

}  // namespace
}  // namespace redsync
