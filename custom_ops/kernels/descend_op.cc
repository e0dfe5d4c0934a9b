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

// Calls Descend() on the variable's own memory.
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
    const int64_t size = tensor->NumElements();
    const int64_t bad = FirstOutOfRange(in.indices, in.entries, size);
    if (bad >= 0) {
      context->SetStatus(in.OutOfRange(size, bad, Shown(in.indices[bad], size)));
      return;
    }
    OP_REQUIRES_OK(context, MakeSoleOwner(context, tensor));
    Descend(in.indices, in.values, in.entries, *in.learning_rate, tensor->flat<float>().data());
  }

 private:
  // Copies the variable if an op that has read it still holds its memory.
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
