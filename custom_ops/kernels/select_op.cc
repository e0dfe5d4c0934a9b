#include <algorithm>
#include <string>
#include <vector>

#include "custom_ops/core/cpu/select.h"
#include "custom_ops/kernels/select_args.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

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
  struct Call : SelectInputs {
    Tensor* message;
    std::vector<Tensor*> new_residuals, new_velocities;
    Tensor* new_ratios;
    Tensor scratch;
    ParallelFor threads;
  };

  tensorflow::Status ReadInputs(OpKernelContext* context, Call* call) const {
    TF_RETURN_IF_ERROR(call->Read(context, attributes_));
    const int32_t sign = call->side->scalar<int32_t>()();
    const bool any_quantized =
        std::count(attributes_.quantized.begin(), attributes_.quantized.end(), true) > 0;
    if (any_quantized && sign != 1 && sign != -1) {
      return InvalidArgument("`side` must be +1 or -1. Received: side=", sign, ".");
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
    call->threads = IntraOpThreads(context);
    return tensorflow::OkStatus();
  }

  tensorflow::Status Allocate(OpKernelContext* context, Call* call) const {
    const int64_t words = MessageWords(call->parts);
    TF_RETURN_IF_ERROR(context->allocate_output("message", TensorShape({words}), &call->message));
    TF_RETURN_IF_ERROR(
        context->allocate_output("new_ratios", call->ratios->shape(), &call->new_ratios));
    TF_RETURN_IF_ERROR(NewState(context, &call->new_residuals, &call->new_velocities));
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
    SelectBuffers buffers;
    call->Set(i, attributes_, call->new_residuals, call->new_velocities, &options, &buffers);
    options.k = call->k->flat<int32_t>()(i);
    options.selector = attributes_.selectors[i];
    options.quantized = part.quantized;
    options.positive_side = call->side->scalar<int32_t>()() > 0;
    options.search = call->search->scalar<bool>()();
    options.ratio = call->ratios->flat<float>()(i);
    buffers.indices = const_cast<uint32_t*>(part.indices(message));
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
    if (part.quantized) *const_cast<int32_t*>(part.values(message)) = BitsOf(result.mean);
    call->new_ratios->flat<float>()(i) = result.ratio;
    return tensorflow::OkStatus();
  }

  SelectAttributes attributes_;
};

REGISTER_KERNEL_BUILDER(Name("RedsyncAccumulateAndSelect").Device(tensorflow::DEVICE_CPU),
                        AccumulateAndSelectOp);

}  // namespace
}  // namespace redsync
