#include "custom_ops/kernels/call_op.h"
#include "custom_ops/kernels/checksum_args.h"
#include "custom_ops/kernels/gpu/checked_op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpKernelContext;

// Queues redsync_gpu_checksum(). To seal, `senders` and `record` are null.
tensorflow::Status QueueChecksum(OpKernelContext* context, const SealCall& messages,
                                 const int32_t* senders, RedsyncGpuRecord* record) {
  const RedsyncGpuChecksum call = {reinterpret_cast<const int32_t*>(messages.in), messages.rows,
                                   messages.words, senders,
                                   reinterpret_cast<int32_t*>(messages.out)};
  return WithScratch(context, redsync_gpu_checksum_scratch_bytes(&call), "A checksum",
                     [&](void* scratch, int64_t bytes, void* stream) {
                       return redsync_gpu_checksum(&call, record, scratch, bytes, stream);
                     });
}

// The host does not check the flags; receivers reject the seal of an invalid flag.
tensorflow::Status SealMessages(OpKernelContext* context, const SealCall& call) {
  return QueueChecksum(context, call, nullptr, nullptr);
}

struct OpenMessages {
  OpenCall call;

  tensorflow::Status Queue(OpKernelContext* context, const OpenCall& from,
                           RedsyncGpuRecord* record) {
    call = from;
    return QueueChecksum(context, call, call.senders, record);
  }

  tensorflow::Status Check(OpKernelContext*, const RedsyncGpuRecord& record) const {
    if (record.position == UINT64_MAX) return tensorflow::OkStatus();
    return call.Corrupted(static_cast<int32_t>(record.position));
  }
};

REGISTER_KERNEL_BUILDER(Name("RedsyncSeal").Device(tensorflow::DEVICE_GPU),
                        CallOp<SealCall, SealMessages>);
REGISTER_KERNEL_BUILDER(Name("RedsyncOpen").Device(tensorflow::DEVICE_GPU).HostMemory("receiver"),
                        CheckedOp<OpenCall, OpenMessages>);

}  // namespace
}  // namespace redsync
