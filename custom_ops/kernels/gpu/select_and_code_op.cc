#include <memory>
#include <vector>

#include "custom_ops/core/gpu/topk_api.h"
#include "custom_ops/kernels/call_op.h"
#include "custom_ops/kernels/gpu/checked_op.h"
#include "custom_ops/kernels/gpu/select_call.h"
#include "custom_ops/kernels/topk_args.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpKernelContext;

// The format for the C interface, with the residuals of ops that have them.
struct GpuTopKFormat {
  std::vector<RedsyncGpuTopKTensor> tensors;
  std::vector<int64_t> rice;
  RedsyncGpuTopKFormat format;

  explicit GpuTopKFormat(const TopKCall& from) : rice(from.rice) {
    for (const TopKTensor& t : from.tensors) {
      tensors.push_back({t.size, t.slots, t.stream, t.residual});
    }
    format = {tensors.data(), static_cast<int64_t>(tensors.size()), rice.data(),
              static_cast<int64_t>(rice.size()), from.value_bits};
  }
  GpuTopKFormat(const GpuTopKFormat&) = delete;
  GpuTopKFormat& operator=(const GpuTopKFormat&) = delete;
};

// Selects into a plain message, and encodes it into the output message.
tensorflow::Status SelectAndCode(OpKernelContext* context, const SelectAndCodeCall& from) {
  if (from.momentum == Momentum::kAdam) {
    return tensorflow::errors::Unimplemented(
        "`epsilon` must be 0 on a GPU. Received: epsilon=", from.epsilon, ".");
  }
  GpuSelection selection(from);
  for (size_t i = 0; i < from.tensors.size(); ++i) selection.tensors[i].k = from.tensors[i].slots;
  tensorflow::Tensor plain;
  const tensorflow::TensorShape shape({redsync_gpu_message_words(&selection.call)});
  TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_INT32, shape, &plain));
  selection.call.message = plain.flat<int32_t>().data();
  TF_RETURN_IF_ERROR(selection.Queue(context));
  const GpuTopKFormat on_gpu(from);
  if (redsync_gpu_topk_words(&on_gpu.format) != from.words) {
    return tensorflow::errors::Internal("The layouts of CPU and GPU differ.");
  }
  const RedsyncGpuEncodeTopK call = {on_gpu.format, selection.call.message, from.message};
  return WithScratch(context, redsync_gpu_encode_topk_scratch_bytes(&call), "Coding",
                     [&](void* scratch, int64_t bytes, void* stream) {
                       return redsync_gpu_encode_topk(&call, scratch, bytes, stream);
                     });
}

struct DecodeMessages {
  static constexpr const char* kWork = "Decoding of coded messages";
  static constexpr const char* kName = "messages";
  static constexpr auto Bytes = redsync_gpu_decode_topk_scratch_bytes;
  static constexpr auto Function = redsync_gpu_decode_topk;
  static constexpr auto Explain = redsync_gpu_explain_decode_topk;

  std::unique_ptr<GpuTopKFormat> format;
  RedsyncGpuDecodeTopK call;

  tensorflow::Status Fill(const DecodeTopKCall& from) {
    format = std::make_unique<GpuTopKFormat>(from);
    call = {format->format, from.messages, from.ranks, from.words, from.plain};
    return tensorflow::OkStatus();
  }
};

REGISTER_KERNEL_BUILDER(Name("RedsyncSelectAndCode").Device(tensorflow::DEVICE_GPU),
                        CallOp<SelectAndCodeCall, SelectAndCode>);
REGISTER_KERNEL_BUILDER(Name("RedsyncUncode").Device(tensorflow::DEVICE_GPU),
                        CodecOp<DecodeTopKCall, DecodeMessages>);

}  // namespace
}  // namespace redsync
