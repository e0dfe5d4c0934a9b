#include <vector>

#include "custom_ops/kernels/gpu/checked_op.h"
#include "custom_ops/kernels/quantize_args.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

static_assert(static_cast<int>(Quantizer::kSign) == REDSYNC_GPU_SIGN &&
                  static_cast<int>(Quantizer::kTwoLevel) == REDSYNC_GPU_TWO_LEVEL &&
                  static_cast<int>(Quantizer::kThreshold) == REDSYNC_GPU_TERNARY &&
                  static_cast<int>(Quantizer::kStochastic) == REDSYNC_GPU_STOCHASTIC &&
                  static_cast<int>(Quantizer::kUniform) == REDSYNC_GPU_UNIFORM &&
                  static_cast<int>(Quantizer::kNatural) == REDSYNC_GPU_NATURAL,
              "the codes of the C interface");

// The format and the tensors for the C interface.
struct QuantizedTensors {
  RedsyncGpuQuantizer quantizer;
  std::vector<RedsyncGpuDense> tensors;

  // Fails if CPU and GPU disagree on the length of the message.
  tensorflow::Status Fill(const QuantizedLayout& layout, const std::vector<float*>& outputs) {
    const QuantizeFormat& format = layout.format;
    quantizer = {static_cast<int32_t>(format.quantizer), format.levels, format.bucket};
    for (int i = 0; i < layout.count(); ++i) {
      tensors.push_back({layout.sizes[i], nullptr, outputs[i]});
    }
    if (redsync_gpu_quantized_words(&quantizer, tensors.data(), layout.count()) == layout.words) {
      return tensorflow::OkStatus();
    }
    return tensorflow::errors::Internal("The layouts of CPU and GPU differ.");
  }
};

struct Quantize : QuantizedTensors {
  static constexpr const char* kWork = "Quantization";
  static constexpr const char* kName = "scales";
  static constexpr auto Function = redsync_gpu_quantize;
  static constexpr auto Explain = redsync_gpu_explain_quantize;
  static int64_t Bytes(const RedsyncGpuQuantize*) { return redsync_gpu_quantize_scratch_bytes(); }

  RedsyncGpuQuantize call;

  tensorflow::Status Fill(const QuantizeCall& from) {
    TF_RETURN_IF_ERROR(QuantizedTensors::Fill(from, from.errors));
    for (int i = 0; i < from.count(); ++i) tensors[i].in = from.tensors[i];
    call = {quantizer, tensors.data(), from.count(), from.scales_in, from.stream, from.message};
    return tensorflow::OkStatus();
  }
};

struct SumQuantized : QuantizedTensors {
  static constexpr const char* kWork = "The sum of codes";
  static constexpr const char* kName = "messages";
  static constexpr auto Bytes = nullptr;
  static constexpr auto Function = redsync_gpu_dequantize;
  static constexpr auto Explain = redsync_gpu_explain_dequantize;

  RedsyncGpuDequantize call;

  tensorflow::Status Fill(const DequantizeSumCall& from) {
    TF_RETURN_IF_ERROR(QuantizedTensors::Fill(from, from.totals));
    call = {quantizer, tensors.data(), from.count(), from.messages, from.ranks, from.words};
    return tensorflow::OkStatus();
  }
};

REGISTER_KERNEL_BUILDER(Name("RedsyncQuantize").Device(tensorflow::DEVICE_GPU),
                        CodecOp<QuantizeCall, Quantize>);
REGISTER_KERNEL_BUILDER(Name("RedsyncDequantizeSum").Device(tensorflow::DEVICE_GPU),
                        CodecOp<DequantizeSumCall, SumQuantized>);

}  // namespace
}  // namespace redsync
