#include <utility>

#include "custom_ops/core/cpu/descend.h"
#include "custom_ops/kernels/descend_args.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"

namespace redsync {
namespace {

using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;

tensorflow::Status DescendAlong(OpKernelContext* context, const DescendInputs& in, Tensor* tensor) {
  const int64_t size = tensor->NumElements();
  const int64_t bad = Descend({in.indices, in.values, in.entries}, *in.learning_rate, size,
                              IntraOpThreads(context), tensor->flat<float>().data());
  if (bad < 0) return tensorflow::OkStatus();
  return in.OutOfRange(size, bad, ReportedIndex(in.indices[bad], size));
}

// Updates the variable in place.
class DescendOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    DescendInputs in;
    OP_REQUIRES_OK(context, in.Read(context));
    tensorflow::core::RefCountPtr<tensorflow::Var> variable;
    OP_REQUIRES_OK(context, tensorflow::LookupResource(
                                context, tensorflow::HandleFromInput(context, 0), &variable));
    tensorflow::mutex_lock lock(*variable->mu());
    Tensor* tensor = variable->tensor();
    OP_REQUIRES_OK(context, in.CheckVariable(*tensor));
    OP_REQUIRES_OK(context, MakeSoleOwner(context, tensor));
    OP_REQUIRES_OK(context, DescendAlong(context, in, tensor));
  }

 private:
  // Copies the variable if another op still references its buffer.
  static tensorflow::Status MakeSoleOwner(OpKernelContext* context, Tensor* tensor) {
    if (tensor->RefCountIsOne()) return tensorflow::OkStatus();
    Tensor copy;
    TF_RETURN_IF_ERROR(context->allocate_temp(tensor->dtype(), tensor->shape(), &copy));
    copy.flat<float>() = tensor->flat<float>();
    *tensor = std::move(copy);
    return tensorflow::OkStatus();
  }
};

// Updates its input in place if no other op needs it, else a copy.
class DescendedOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    DescendInputs in;
    OP_REQUIRES_OK(context, in.Read(context));
    const Tensor& start = context->input(0);
    Tensor* result;
    OP_REQUIRES_OK(context,
                   context->forward_input_or_allocate_output({0}, 0, start.shape(), &result));
    if (!result->SharesBufferWith(start)) result->flat<float>() = start.flat<float>();
    OP_REQUIRES_OK(context, DescendAlong(context, in, result));
  }
};

REGISTER_KERNEL_BUILDER(Name("RedsyncDescend").Device(tensorflow::DEVICE_CPU), DescendOp);
REGISTER_KERNEL_BUILDER(Name("RedsyncDescended").Device(tensorflow::DEVICE_CPU), DescendedOp);

}  // namespace
}  // namespace redsync
