#include <vector>

#include "custom_ops/core/cpu/rice.h"
#include "custom_ops/kernels/codec.h"
#include "custom_ops/kernels/layout.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;

constexpr int64_t kNumberCost = 8;  // Cycles to read one.

tensorflow::Status ReadRice(OpKernelConstruction* context, RiceFormat* format) {
  int64_t rice;
  TF_RETURN_IF_ERROR(ReadInt(context, "rice", 0, kMaxRice, &rice));
  format->rice = static_cast<int>(rice);
  return ReadInt(context, "bitmap_words", 0, kMaxBitmapWords, &format->bitmap_words);
}

class RiceEncodeOp : public tensorflow::OpKernel {
 public:
  explicit RiceEncodeOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, ReadRice(context, &format_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& numbers = context->input(0);
    RiceFormat format = format_;
    format.count = numbers.NumElements();
    OP_REQUIRES_OK(context, CheckShape("numbers", numbers, -2, format.count));
    Tensor* code;
    OP_REQUIRES_OK(context, context->allocate_output("code", TensorShape({format.words()}), &code));
    CodecError error;
    const Status status =
        RiceEncode(format, numbers.flat<int32_t>().data(), code->flat<int32_t>().data(), &error);
    OP_REQUIRES(context, status == Status::kOk, Describe("numbers", error));
  }

 private:
  RiceFormat format_;
};

class RiceDecodeOp : public tensorflow::OpKernel {
 public:
  explicit RiceDecodeOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, ReadRice(context, &format_));
    OP_REQUIRES_OK(context, ReadInt(context, "count", 0, INT32_MAX, &format_.count));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& codes = context->input(0);
    OP_REQUIRES_OK(context, CheckShape("codes", codes, -1, format_.words()));
    const int64_t rows = codes.dim_size(0);
    Tensor* numbers;
    OP_REQUIRES_OK(
        context, context->allocate_output("numbers", TensorShape({rows, format_.count}), &numbers));
    std::vector<CodecError> errors(rows);
    const int64_t cost = kNumberCost * (format_.count + format_.bitmap_words);
    IntraOpThreads(context)(rows, cost, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        RiceDecode(format_, codes.flat<int32_t>().data() + row * format_.words(),
                   numbers->flat<int32_t>().data() + row * format_.count, &errors[row]);
        errors[row].rank = row;
      }
    });
    OP_REQUIRES_OK(context, FirstError("codes", errors));
  }

 private:
  RiceFormat format_;
};

REGISTER_KERNEL_BUILDER(Name("RedsyncRiceEncode").Device(tensorflow::DEVICE_CPU), RiceEncodeOp);
REGISTER_KERNEL_BUILDER(Name("RedsyncRiceDecode").Device(tensorflow::DEVICE_CPU), RiceDecodeOp);

}  // namespace
}  // namespace redsync
