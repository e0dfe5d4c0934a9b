#include <utility>

#include "custom_ops/kernels/descend_args.h"
#include "custom_ops/kernels/gpu/checked_op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"

namespace redsync {
namespace {

using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;

struct DescendCall : DescendInputs {
  tensorflow::Status ReadAttributes(tensorflow::OpKernelConstruction*) {
    return tensorflow::OkStatus();
  }
  tensorflow::Status Prepare(OpKernelContext* context) { return Read(context); }
};

// Queues a descent from the values in `memory`.
tensorflow::Status QueueDescent(OpKernelContext* context, const DescendCall& in, int64_t size,
                                float* memory, RedsyncGpuRecord* record) {
  const RedsyncGpuDescend call = {in.indices, in.values, in.learning_rate,
                                  in.entries, size,      memory};
  return WithScratch(context, redsync_gpu_descend_scratch_bytes(), "Descent",
                     [&](void* scratch, int64_t bytes, void* stream) {
                       return redsync_gpu_descend(&call, record, scratch, bytes, stream);
                     });
}

tensorflow::Status CheckIndices(int64_t size, const RedsyncGpuRecord& bad) {
  if (bad.position == UINT64_MAX) return tensorflow::OkStatus();
  return DescendInputs::OutOfRange(size, static_cast<int64_t>(bad.position), bad.value);
}

tensorflow::Status Copy(OpKernelContext* context, const Tensor& from, Tensor* to) {
  return FromCode(redsync_gpu_copy(to->data(), from.data(), static_cast<int64_t>(from.TotalBytes()),
                                   StreamOf(context)),
                  "Copying a tensor");
}

// Updates the variable in place.
struct Descent {
  int64_t size;  // Elements of the variable.

  tensorflow::Status Queue(OpKernelContext* context, const DescendCall& in,
                           RedsyncGpuRecord* record) {
    tensorflow::core::RefCountPtr<tensorflow::Var> variable;
    TF_RETURN_IF_ERROR(
        tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, 0), &variable));
    // Held only while work is queued, because an op that locks later is queued later.
    tensorflow::mutex_lock lock(*variable->mu());
    Tensor* tensor = variable->tensor();
    TF_RETURN_IF_ERROR(in.CheckVariable(*tensor));
    TF_RETURN_IF_ERROR(MakeSoleOwner(context, tensor));
    size = tensor->NumElements();
    return QueueDescent(context, in, size, tensor->flat<float>().data(), record);
  }

  tensorflow::Status Check(OpKernelContext*, const RedsyncGpuRecord& bad) const {
    return CheckIndices(size, bad);
  }

 private:
  // Copies the variable if another op still references its buffer.
  static tensorflow::Status MakeSoleOwner(OpKernelContext* context, Tensor* tensor) {
    if (tensor->RefCountIsOne()) return tensorflow::OkStatus();
    Tensor copy;
    TF_RETURN_IF_ERROR(context->allocate_temp(tensor->dtype(), tensor->shape(), &copy));
    TF_RETURN_IF_ERROR(Copy(context, *tensor, &copy));
    *tensor = std::move(copy);
    return tensorflow::OkStatus();
  }
};

// Updates its input in place if no other op needs it, else a copy.
struct DescentFrom {
  int64_t size;  // Elements of the tensor.

  tensorflow::Status Queue(OpKernelContext* context, const DescendCall& in,
                           RedsyncGpuRecord* record) {
    const Tensor& start = context->input(0);
    size = start.NumElements();
    Tensor* result;
    TF_RETURN_IF_ERROR(context->forward_input_or_allocate_output({0}, 0, start.shape(), &result));
    if (!result->SharesBufferWith(start)) TF_RETURN_IF_ERROR(Copy(context, start, result));
    return QueueDescent(context, in, size, result->flat<float>().data(), record);
  }

  tensorflow::Status Check(OpKernelContext*, const RedsyncGpuRecord& bad) const {
    return CheckIndices(size, bad);
  }
};

REGISTER_KERNEL_BUILDER(
    Name("RedsyncDescend").Device(tensorflow::DEVICE_GPU).HostMemory("variable"),
    CheckedOp<DescendCall, Descent>);
REGISTER_KERNEL_BUILDER(Name("RedsyncDescended").Device(tensorflow::DEVICE_GPU),
                        CheckedOp<DescendCall, DescentFrom>);

}  // namespace
}  // namespace redsync
