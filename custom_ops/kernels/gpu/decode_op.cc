#include <vector>

#include "custom_ops/kernels/gpu/checked_op.h"
#include "custom_ops/kernels/select_args.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpKernelContext;

struct Decode {
  std::vector<RedsyncGpuPart> parts;
  RedsyncGpuSumMessages call;

  tensorflow::Status Queue(OpKernelContext* context, const DecodeCall& from,
                           RedsyncGpuRecord* record) {
    for (size_t i = 0; i < from.parts.size(); ++i) {
      const Part& part = from.parts[i];
      parts.push_back({part.offset, part.capacity, part.size, part.quantized, from.totals[i]});
    }
    call = {from.messages, from.ranks, from.words(), parts.data(),
            static_cast<int64_t>(parts.size())};
    return FromCode(redsync_gpu_sum_messages(&call, record, StreamOf(context)), "Decoding");
  }

  tensorflow::Status Check(OpKernelContext*, const RedsyncGpuRecord& record) const {
    RedsyncGpuError e;
    if (!redsync_gpu_explain_sum_messages(&call, &record, &e)) return tensorflow::OkStatus();
    return InvalidMessage(e.field, e.tensor, e.rank, e.slot, e.value, e.limit);
  }
};

REGISTER_KERNEL_BUILDER(Name("RedsyncDecode").Device(tensorflow::DEVICE_GPU).HostMemory("k"),
                        CheckedOp<DecodeCall, Decode>);

}  // namespace
}  // namespace redsync
