#include <memory>
#include <utility>

#include "custom_ops/kernels/gpu/stream.h"
#include "custom_ops/kernels/op_support.h"
#include "custom_ops/kernels/select_args.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"

namespace redsync {
namespace {

using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;
using ::tensorflow::errors::InvalidArgument;

// Queues redsync_gpu_descend() on the variable's own memory; asynchronous as GpuDecodeOp is.
class GpuDescendOp : public tensorflow::AsyncOpKernel {
 public:
  explicit GpuDescendOp(tensorflow::OpKernelConstruction* context) : AsyncOpKernel(context) {}

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    auto work = std::make_shared<Work>();
    OP_REQUIRES_OK_ASYNC(context, Queue(context, work.get()), done);
    CheckThenDone(
        context, &work->record,
        [context, work]() {
          const RedsyncGpuRecord& bad = work->record.host();
          if (bad.position != UINT64_MAX) {
            context->SetStatus(InvalidArgument("`indices` must be in [0, ", work->size,
                                               "). Received: indices[", bad.position,
                                               "]=", bad.value, "."));
          }
        },
        std::move(done));
  }

 private:
  struct Work {
    int64_t size;
    RecordPair record;
  };

  static tensorflow::Status Queue(OpKernelContext* context, Work* work) {
    const Tensor &indices = context->input(1), &values = context->input(2),
                 &learning_rate = context->input(3);
    TF_RETURN_IF_ERROR(CheckDescend(indices, values, learning_rate));
    tensorflow::core::RefCountPtr<tensorflow::Var> variable;
    TF_RETURN_IF_ERROR(
        tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, 0), &variable));
    // Held while work is queued: whatever locks later is queued later.
    tensorflow::mutex_lock lock(*variable->mu());
    Tensor* tensor = variable->tensor();
    if (tensor->dtype() != tensorflow::DT_FLOAT || !tensor->IsInitialized()) {
      return InvalidArgument("`variable` must be an initialized float32 variable.");
    }
    TF_RETURN_IF_ERROR(MakeSoleOwner(context, tensor));
    work->size = tensor->NumElements();
    const RedsyncGpuDescend call = {Words(indices),
                                    values.flat<float>().data(),
                                    learning_rate.scalar<float>().data(),
                                    indices.NumElements(),
                                    work->size,
                                    tensor->flat<float>().data()};
    const int64_t bytes = redsync_gpu_descend_scratch_bytes();
    Tensor scratch;
    TF_RETURN_IF_ERROR(
        context->allocate_temp(tensorflow::DT_UINT8, TensorShape({bytes}), &scratch));
    TF_RETURN_IF_ERROR(work->record.Allocate(context));
    return FromCode(
        redsync_gpu_descend(&call, work->record.device(), scratch.data(), bytes, StreamOf(context)),
        "Descent");
  }

  // Whoever has read the variable before keeps the values that it read.
  static tensorflow::Status MakeSoleOwner(OpKernelContext* context, Tensor* tensor) {
    if (tensor->RefCountIsOne()) return tensorflow::OkStatus();
    Tensor copy;
    TF_RETURN_IF_ERROR(context->allocate_temp(tensor->dtype(), tensor->shape(), &copy));
    TF_RETURN_IF_ERROR(FromCode(
        redsync_gpu_copy(copy.data(), tensor->data(), tensor->TotalBytes(), StreamOf(context)),
        "Copying the variable"));
    *tensor = std::move(copy);
    return tensorflow::OkStatus();
  }
};

REGISTER_KERNEL_BUILDER(
    Name("RedsyncDescend").Device(tensorflow::DEVICE_GPU).HostMemory("variable"), GpuDescendOp);

}  // namespace
}  // namespace redsync
