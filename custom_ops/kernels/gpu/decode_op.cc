#include <memory>
#include <utility>
#include <vector>

#include "custom_ops/kernels/gpu/stream.h"
#include "custom_ops/kernels/select_args.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpInputList;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::errors::InvalidArgument;

// Queues redsync_gpu_sum_messages(). The device validates the messages, so whether they are valid
// is known when it gets there only: asynchronous, so that no thread waits for that, and the error
// is still raised by this op and before anything uses its outputs.
class GpuDecodeOp : public tensorflow::AsyncOpKernel {
 public:
  explicit GpuDecodeOp(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, attributes_.Read(context));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    auto work = std::make_shared<Work>();
    OP_REQUIRES_OK_ASYNC(context, Queue(context, work.get()), done);
    CheckThenDone(
        context, &work->record,
        [context, work]() {
          RedsyncGpuError error;
          if (redsync_gpu_explain_sum_messages(&work->call, &work->record.host(), &error)) {
            context->SetStatus(InvalidMessage(error.field, error.tensor, error.rank, error.slot,
                                              error.value, error.limit));
          }
        },
        std::move(done));
  }

 private:
  struct Work {
    std::vector<RedsyncGpuPart> parts;
    RedsyncGpuSumMessages call;
    RecordPair record;
  };

  tensorflow::Status Queue(OpKernelContext* context, Work* work) const {
    const Tensor *received, *k;
    OpInputList like;
    std::vector<Part> parts;
    TF_RETURN_IF_ERROR(context->input("messages", &received));
    TF_RETURN_IF_ERROR(context->input("k", &k));
    TF_RETURN_IF_ERROR(context->input_list("like", &like));
    TF_RETURN_IF_ERROR(MakeParts(attributes_, "like", like, *k, &parts));
    if (received->dims() != 2 || received->dim_size(1) != MessageWords(parts)) {
      return InvalidArgument("`messages` must have shape [workers, ", MessageWords(parts),
                             "], the number of words that `k` implies. Received: ",
                             received->shape().DebugString(), ".");
    }
    for (size_t i = 0; i < parts.size(); ++i) {
      Tensor* total;
      TF_RETURN_IF_ERROR(context->forward_input_or_allocate_output({2 + static_cast<int>(i)}, i,
                                                                   like[i].shape(), &total));
      work->parts.push_back({parts[i].offset, parts[i].capacity, parts[i].size, parts[i].quantized,
                             total->flat<float>().data()});
    }
    work->call = {received->flat<int32_t>().data(), received->dim_size(0), received->dim_size(1),
                  work->parts.data(), static_cast<int64_t>(work->parts.size())};
    TF_RETURN_IF_ERROR(work->record.Allocate(context));
    return FromCode(redsync_gpu_sum_messages(&work->call, work->record.device(), StreamOf(context)),
                    "Decoding");
  }

  TensorAttributes attributes_;
};

REGISTER_KERNEL_BUILDER(Name("RedsyncDecode").Device(tensorflow::DEVICE_GPU).HostMemory("k"),
                        GpuDecodeOp);

}  // namespace
}  // namespace redsync
