#include <utility>

#include "custom_ops/core/cpu/descend.h"
#include "custom_ops/kernels/op_support.h"
#include "custom_ops/kernels/select_args.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"

namespace redsync {
namespace {

using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::errors::InvalidArgument;

// Validates and calls Descend() on the variable's own memory.
class DescendOp : public tensorflow::OpKernel {
 public:
  explicit DescendOp(tensorflow::OpKernelConstruction* context) : OpKernel(context) {}

  void Compute(OpKernelContext* context) override {
    const Tensor &indices = context->input(1), &values = context->input(2),
                 &learning_rate = context->input(3);
    OP_REQUIRES_OK(context, CheckDescend(indices, values, learning_rate));
    tensorflow::core::RefCountPtr<tensorflow::Var> variable;
    OP_REQUIRES_OK(context, tensorflow::LookupResource(
                                context, tensorflow::HandleFromInput(context, 0), &variable));
    tensorflow::mutex_lock lock(*variable->mu());
    Tensor* tensor = variable->tensor();
    OP_REQUIRES(context, tensor->dtype() == tensorflow::DT_FLOAT && tensor->IsInitialized(),
                InvalidArgument("`variable` must be an initialized float32 variable."));
    const uint32_t* positions = Words(indices);
    const int64_t entries = indices.NumElements();
    const int64_t bad = FirstOutOfRange(positions, entries, tensor->NumElements());
    OP_REQUIRES(context, bad < 0,
                InvalidArgument(
                    "`indices` must be in [0, ", tensor->NumElements(), "). Received: indices[",
                    bad, "]=", bad < 0 ? 0 : Shown(positions[bad], tensor->NumElements()), "."));
    OP_REQUIRES_OK(context, MakeSoleOwner(context, tensor));
    Descend(positions, values.flat<float>().data(), entries, learning_rate.scalar<float>()(),
            tensor->flat<float>().data());
  }

 private:
  // Whoever has read the variable before keeps the values that it read.
  static tensorflow::Status MakeSoleOwner(OpKernelContext* context, Tensor* tensor) {
    if (tensor->RefCountIsOne()) return tensorflow::OkStatus();
    Tensor copy;
    TF_RETURN_IF_ERROR(context->allocate_temp(tensor->dtype(), tensor->shape(), &copy));
    copy.flat<float>() = tensor->flat<float>();
    *tensor = std::move(copy);
    return tensorflow::OkStatus();
  }
};

REGISTER_KERNEL_BUILDER(Name("RedsyncDescend").Device(tensorflow::DEVICE_CPU), DescendOp);

}  // namespace
}  // namespace redsync
