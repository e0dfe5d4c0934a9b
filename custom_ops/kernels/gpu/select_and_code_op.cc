#include <atomic>
#include <memory>
#include <vector>

#include "custom_ops/core/gpu/topk_api.h"
#include "custom_ops/kernels/gpu/select_call.h"
#include "custom_ops/kernels/topk_args.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;

// The format as the C interface has it; residuals only where there are some.
struct GpuFormat {
  std::vector<RedsyncGpuTopKTensor> tensors;
  std::vector<int64_t> rice;
  RedsyncGpuTopKFormat format;

  GpuFormat(const TopKFormat& from, const std::vector<TopKTensor>& selected) {
    for (const TopKTensor& t : selected) {
      tensors.push_back({t.size, t.slots, t.stream, t.residual});
    }
    for (const GolombFormat& stream : from.streams) rice.push_back(stream.rice);
    format = {tensors.data(), static_cast<int64_t>(tensors.size()), rice.data(),
              static_cast<int64_t>(rice.size()), from.value_bits};
  }
  GpuFormat(const GpuFormat&) = delete;
  GpuFormat& operator=(const GpuFormat&) = delete;
};

// Queues redsync_gpu_select() for a plain message, and redsync_gpu_encode_topk() for the one that
// is sent.
class GpuSelectAndCodeOp : public tensorflow::OpKernel {
 public:
  explicit GpuSelectAndCodeOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, attributes_.Read(context));
  }

  void Compute(OpKernelContext* context) override {
    AccumulateInputs in;
    OP_REQUIRES_OK(context, in.Read(context, attributes_));
    TopKFormat format;
    std::vector<TopKTensor> selected;
    OP_REQUIRES_OK(context, attributes_.Lay(in.grads, &format, &selected));
    std::vector<Tensor*> new_residuals, new_velocities;
    Tensor* message;
    const int64_t words = format.words(selected.data(), static_cast<int64_t>(selected.size()));
    OP_REQUIRES_OK(context, context->allocate_output("message", TensorShape({words}), &message));
    OP_REQUIRES_OK(context, NewState(context, &new_residuals, &new_velocities));
    GpuSelection selection(in, attributes_, new_residuals, new_velocities,
                           calls_.fetch_add(1, std::memory_order_relaxed));
    for (size_t i = 0; i < selected.size(); ++i) {
      selection.tensors[i].k = selected[i].slots;
      selected[i].residual = new_residuals[i]->flat<float>().data();
    }
    Tensor plain, scratch;
    const TensorShape shape({redsync_gpu_message_words(&selection.call)});
    OP_REQUIRES_OK(context, context->allocate_temp(tensorflow::DT_INT32, shape, &plain));
    selection.call.message = plain.flat<int32_t>().data();
    OP_REQUIRES_OK(context, selection.Queue(context));
    const GpuFormat on_gpu(format, selected);
    const RedsyncGpuEncodeTopK call = {on_gpu.format, selection.call.message,
                                       message->flat<int32_t>().data()};
    OP_REQUIRES(context, redsync_gpu_topk_words(&on_gpu.format) == words,
                tensorflow::errors::Internal("The layouts of CPU and GPU differ."));
    const int64_t bytes = redsync_gpu_encode_topk_scratch_bytes(&call);
    OP_REQUIRES_OK(context, AllocateScratch(context, bytes, &scratch));
    const int code = redsync_gpu_encode_topk(&call, scratch.data(), bytes, StreamOf(context));
    OP_REQUIRES_OK(context, FromCode(code, "Coding"));
  }

 private:
  SelectAndCodeAttributes attributes_;
  std::atomic<uint32_t> calls_{0};
};

struct DecodeTopKWork {
  static constexpr const char* kWhat = "Decoding of coded messages";
  static constexpr const char* kName = "messages";
  static constexpr auto Bytes = redsync_gpu_decode_topk_scratch_bytes;
  static constexpr auto Function = redsync_gpu_decode_topk;
  static constexpr auto Explain = redsync_gpu_explain_decode_topk;

  std::unique_ptr<GpuFormat> format;
  RedsyncGpuDecodeTopK call;
  RecordPair record;

  void Fill(const DecodeTopKCall& from) {
    format = std::make_unique<GpuFormat>(from.format, from.tensors);
    call = {format->format, from.messages, from.ranks, from.words, from.plain};
  }
};

REGISTER_KERNEL_BUILDER(Name("RedsyncSelectAndCode").Device(tensorflow::DEVICE_GPU),
                        GpuSelectAndCodeOp);
REGISTER_KERNEL_BUILDER(
    Name("RedsyncUncode").Device(tensorflow::DEVICE_GPU),
    CheckedCallOp<DecodeTopKWork, DecodeTopKCall, &DecodeTopKCall::Read, &DecodeTopKCall::Prepare>);

}  // namespace
}  // namespace redsync
