#include <vector>

#include "custom_ops/kernels/gpu/checked_op.h"
#include "custom_ops/kernels/quantize_args.h"
#include "custom_ops/kernels/select_args.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpInputList;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;

static_assert(static_cast<int>(Quantizer::kSign) == REDSYNC_GPU_SIGN &&
                  static_cast<int>(Quantizer::kTwoLevel) == REDSYNC_GPU_TWO_LEVEL &&
                  static_cast<int>(Quantizer::kThreshold) == REDSYNC_GPU_TERNARY &&
                  static_cast<int>(Quantizer::kStochastic) == REDSYNC_GPU_STOCHASTIC &&
                  static_cast<int>(Quantizer::kUniform) == REDSYNC_GPU_UNIFORM &&
                  static_cast<int>(Quantizer::kNatural) == REDSYNC_GPU_NATURAL,
              "the codes of the C interface");

RedsyncGpuQuantizer ToGpu(const QuantizeFormat& format) {
  return {static_cast<int32_t>(format.quantizer), format.levels, format.bucket};
}

// Checks that both sides mean the same message.
tensorflow::Status CheckTensors(const OpInputList& tensors, const QuantizeFormat& format,
                                const QuantizeLayout& layout, std::vector<RedsyncGpuDense>* dense) {
  for (int i = 0; i < tensors.size(); ++i) {
    dense->push_back({tensors[i].NumElements(), tensors[i].flat<float>().data(), nullptr});
  }
  const RedsyncGpuQuantizer quantizer = ToGpu(format);
  if (redsync_gpu_quantized_words(&quantizer, dense->data(), dense->size()) == layout.words) {
    return tensorflow::OkStatus();
  }
  return tensorflow::errors::Internal("The layouts of CPU and GPU differ.");
}

struct QuantizeWork {
  static constexpr const char* kWhat = "Quantisation";
  static constexpr const char* kName = "scales";
  static constexpr auto Explain = redsync_gpu_explain_quantize;

  std::vector<RedsyncGpuDense> tensors;
  RedsyncGpuQuantize call;
  RecordPair record;
};

class GpuQuantizeOp : public CheckedOp<QuantizeWork> {
 public:
  explicit GpuQuantizeOp(OpKernelConstruction* context) : CheckedOp(context) {
    OP_REQUIRES_OK(context, ReadFormat(context, &format_));
  }

 private:
  tensorflow::Status Queue(OpKernelContext* context, QuantizeWork* work) const override {
    OpInputList tensors;
    const Tensor *scales, *stream;
    Tensor* message;
    TF_RETURN_IF_ERROR(context->input_list("tensors", &tensors));
    TF_RETURN_IF_ERROR(context->input("scales", &scales));
    TF_RETURN_IF_ERROR(context->input("stream", &stream));
    const QuantizeLayout layout(format_, tensors);
    TF_RETURN_IF_ERROR(CheckShape("scales", *scales, -2, layout.scales()));
    TF_RETURN_IF_ERROR(CheckShape("stream", *stream, -2, 3));
    TF_RETURN_IF_ERROR(CheckTensors(tensors, format_, layout, &work->tensors));
    TF_RETURN_IF_ERROR(context->allocate_output("message", TensorShape({layout.words}), &message));
    for (int i = 0; i < tensors.size() && context->num_outputs() > 1; ++i) {
      Tensor* errors;
      TF_RETURN_IF_ERROR(
          context->forward_input_or_allocate_output({i}, 1 + i, tensors[i].shape(), &errors));
      work->tensors[i].out = errors->flat<float>().data();
    }
    work->call = {ToGpu(format_),
                  work->tensors.data(),
                  static_cast<int64_t>(work->tensors.size()),
                  scales->flat<float>().data(),
                  stream->flat<int32_t>().data(),
                  message->flat<int32_t>().data()};
    return Run(context, work, redsync_gpu_quantize_scratch_bytes(), redsync_gpu_quantize);
  }

  QuantizeFormat format_;
};

struct DequantizeWork {
  static constexpr const char* kWhat = "The sum of codes";
  static constexpr const char* kName = "messages";
  static constexpr auto Explain = redsync_gpu_explain_dequantize;

  std::vector<RedsyncGpuDense> tensors;
  RedsyncGpuDequantize call;
  RecordPair record;
};

class GpuDequantizeSumOp : public CheckedOp<DequantizeWork> {
 public:
  explicit GpuDequantizeSumOp(OpKernelConstruction* context) : CheckedOp(context) {
    OP_REQUIRES_OK(context, ReadFormat(context, &format_));
  }

 private:
  tensorflow::Status Queue(OpKernelContext* context, DequantizeWork* work) const override {
    OpInputList like;
    const Tensor* messages;
    TF_RETURN_IF_ERROR(context->input("messages", &messages));
    TF_RETURN_IF_ERROR(context->input_list("like", &like));
    const QuantizeLayout layout(format_, like);
    TF_RETURN_IF_ERROR(CheckShape("messages", *messages, -1, layout.words));
    TF_RETURN_IF_ERROR(CheckTensors(like, format_, layout, &work->tensors));
    for (int i = 0; i < like.size(); ++i) {
      Tensor* total;
      TF_RETURN_IF_ERROR(
          context->forward_input_or_allocate_output({1 + i}, i, like[i].shape(), &total));
      work->tensors[i].out = total->flat<float>().data();
    }
    work->call = {ToGpu(format_),
                  work->tensors.data(),
                  static_cast<int64_t>(work->tensors.size()),
                  messages->flat<int32_t>().data(),
                  messages->dim_size(0),
                  messages->dim_size(1)};
    return Run(context, work, redsync_gpu_dequantize);
  }

  QuantizeFormat format_;
};

REGISTER_KERNEL_BUILDER(Name("RedsyncQuantize").Device(tensorflow::DEVICE_GPU), GpuQuantizeOp);
REGISTER_KERNEL_BUILDER(Name("RedsyncDequantizeSum").Device(tensorflow::DEVICE_GPU),
                        GpuDequantizeSumOp);

}  // namespace
}  // namespace redsync
