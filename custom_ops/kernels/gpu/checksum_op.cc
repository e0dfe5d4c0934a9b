#include <memory>
#include <utility>

#include "custom_ops/kernels/checksum_args.h"
#include "custom_ops/kernels/gpu/stream.h"
#include "custom_ops/kernels/op_support.h"
#include "custom_ops/kernels/select_args.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;

// Queues redsync_gpu_checksum(). `senders` and `record` are null for sealing.
tensorflow::Status QueueChecksum(OpKernelContext* context, const int32_t* senders,
                                 RedsyncGpuRecord* record) {
  Tensor* out;
  TF_RETURN_IF_ERROR(AllocateMessages(context, &out));
  const Tensor& messages = context->input(0);
  const RedsyncGpuChecksum call = {messages.flat<int32_t>().data(), messages.dim_size(0),
                                   messages.dim_size(1), senders, out->flat<int32_t>().data()};
  const int64_t bytes = redsync_gpu_checksum_scratch_bytes(&call);
  Tensor scratch;
  TF_RETURN_IF_ERROR(
      context->allocate_temp(tensorflow::DT_UINT8, tensorflow::TensorShape({bytes}), &scratch));
  return FromCode(redsync_gpu_checksum(&call, record, scratch.data(), bytes, StreamOf(context)),
                  "A checksum");
}

// A wrong flag is not known on the host: no receiver accepts its seal.
class GpuSealOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    OP_REQUIRES_OK(context, QueueChecksum(context, nullptr, nullptr));
  }
};

// Asynchronous as decoding is: nothing uses a message before it is known to be what was sent.
class GpuOpenOp : public tensorflow::AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const Tensor &senders = context->input(1), *receiver;
    OP_REQUIRES_OK_ASYNC(context, CheckShape("senders", senders, -2, context->input(0).dim_size(0)),
                         done);
    OP_REQUIRES_OK_ASYNC(context, Scalar(context, "receiver", &receiver), done);
    const int32_t rank = receiver->scalar<int32_t>()();
    auto record = std::make_shared<RecordPair>();
    OP_REQUIRES_OK_ASYNC(context, record->Allocate(context), done);
    OP_REQUIRES_OK_ASYNC(
        context, QueueChecksum(context, senders.flat<int32_t>().data(), record->device()), done);
    CheckThenDone(
        context, record.get(),
        [context, record, rank]() {
          const RedsyncGpuRecord& found = record->host();
          if (found.position != UINT64_MAX) {
            context->SetStatus(ChangedMessage(context->input(0).dim_size(1), rank,
                                              static_cast<int32_t>(found.position)));
          }
        },
        std::move(done));
  }
};

REGISTER_KERNEL_BUILDER(Name("RedsyncSeal").Device(tensorflow::DEVICE_GPU), GpuSealOp);
REGISTER_KERNEL_BUILDER(Name("RedsyncOpen").Device(tensorflow::DEVICE_GPU).HostMemory("receiver"),
                        GpuOpenOp);

}  // namespace
}  // namespace redsync
