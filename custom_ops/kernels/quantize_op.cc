#include <algorithm>
#include <string>
#include <vector>

#include "custom_ops/core/cpu/quantize.h"
#include "custom_ops/kernels/op_support.h"
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

class QuantizeOp : public tensorflow::OpKernel {
 public:
  explicit QuantizeOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, ReadFormat(context, &format_));
  }

  void Compute(OpKernelContext* context) override {
    OpInputList tensors;
    const Tensor *scales, *stream;
    OP_REQUIRES_OK(context, context->input_list("tensors", &tensors));
    OP_REQUIRES_OK(context, context->input("scales", &scales));
    OP_REQUIRES_OK(context, context->input("stream", &stream));
    const QuantizeLayout layout(format_, tensors);
    OP_REQUIRES_OK(context, CheckShape("scales", *scales, -2, layout.scales()));
    OP_REQUIRES_OK(context, CheckShape("stream", *stream, -2, 3));
    const auto numbers = stream->flat<int32_t>();
    const RandomStream random = {static_cast<uint32_t>(numbers(0)),
                                 static_cast<uint32_t>(numbers(1)),
                                 static_cast<uint32_t>(numbers(2))};
    Tensor* output;
    OP_REQUIRES_OK(context,
                   context->allocate_output("message", TensorShape({layout.words}), &output));
    int32_t* message = output->flat<int32_t>().data();
    const float* given = scales->flat<float>().data();
    bool finite = true;
    for (int i = 0; i < tensors.size(); ++i) {
      OP_REQUIRES_OK(context,
                     QuantizeOne(context, layout, tensors[i], i, given, random, message, &finite));
    }
    message[0] = finite;
    if (!finite) std::fill(message, message + layout.words, 0);
  }

 private:
  tensorflow::Status QuantizeOne(OpKernelContext* context, const QuantizeLayout& layout,
                                 const Tensor& x, int i, const float* given,
                                 const RandomStream& random, int32_t* message, bool* finite) const {
    const int64_t size = x.NumElements();
    const float* scales = given + layout.scales_at[i] - 1;
    CodecError error;
    if (CheckScales(format_, scales, size, false, &error) != Status::kOk) {
      error.tensor = i;
      return Describe("scales", error);
    }
    int32_t* sent = message + layout.scales_at[i];
    std::fill_n(sent, format_.scales(size), 0);
    if (size > 0) std::transform(scales, scales + format_.scales(size), sent, BitsOf);
    float* errors = nullptr;
    if (context->num_outputs() > 1) {
      Tensor* tensor;
      TF_RETURN_IF_ERROR(context->forward_input_or_allocate_output({i}, 1 + i, x.shape(), &tensor));
      errors = tensor->flat<float>().data();
    }
    *finite &= QuantizeTensor(format_, x.flat<float>().data(), scales, size, random, i,
                              IntraOpThreads(context), message + layout.words_at[i], errors);
    return tensorflow::OkStatus();
  }

  QuantizeFormat format_;
};

class DequantizeSumOp : public tensorflow::OpKernel {
 public:
  explicit DequantizeSumOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, ReadFormat(context, &format_));
  }

  void Compute(OpKernelContext* context) override {
    OpInputList like;
    const Tensor* messages;
    OP_REQUIRES_OK(context, context->input("messages", &messages));
    OP_REQUIRES_OK(context, context->input_list("like", &like));
    const QuantizeLayout layout(format_, like);
    OP_REQUIRES_OK(context, CheckShape("messages", *messages, -1, layout.words));
    OP_REQUIRES_OK(context, Check(*messages, layout, like));
    for (int i = 0; i < like.size(); ++i) {
      Tensor* total;
      OP_REQUIRES_OK(
          context, context->forward_input_or_allocate_output({1 + i}, i, like[i].shape(), &total));
      CodecError error;
      const Status status =
          DequantizeSum(format_, Part(*messages, layout, like, i), IntraOpThreads(context),
                        total->flat<float>().data(), &error);
      error.tensor = i;
      OP_REQUIRES(context, status == Status::kOk, Describe("messages", error));
    }
  }

 private:
  static QuantizedTensor Part(const Tensor& messages, const QuantizeLayout& layout,
                              const OpInputList& like, int i) {
    return {messages.flat<int32_t>().data(),
            messages.dim_size(0),
            layout.words,
            layout.scales_at[i],
            layout.words_at[i],
            like[i].NumElements()};
  }

  tensorflow::Status Check(const Tensor& messages, const QuantizeLayout& layout,
                           const OpInputList& like) const {
    for (int64_t rank = 0; rank < messages.dim_size(0); ++rank) {
      const int32_t* row = messages.flat<int32_t>().data() + rank * layout.words;
      CodecError error;
      error.rank = rank;
      if (row[0] != 0 && row[0] != 1) {
        error.field = "flag";
        error.value = row[0];
        error.limit = 1;
        return Describe("messages", error);
      }
      for (int i = 0; i < like.size() && row[0] == 1; ++i) {
        const auto* scales = reinterpret_cast<const float*>(row + layout.scales_at[i]);
        if (CheckScales(format_, scales, like[i].NumElements(), true, &error) != Status::kOk) {
          error.tensor = i;
          return Describe("messages", error);
        }
      }
    }
    return tensorflow::OkStatus();
  }

  QuantizeFormat format_;
};

REGISTER_KERNEL_BUILDER(Name("RedsyncQuantize").Device(tensorflow::DEVICE_CPU), QuantizeOp);
REGISTER_KERNEL_BUILDER(Name("RedsyncDequantizeSum").Device(tensorflow::DEVICE_CPU),
                        DequantizeSumOp);

}  // namespace
}  // namespace redsync
