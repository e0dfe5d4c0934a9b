#include "custom_ops/core/cpu/halves.h"
#include "custom_ops/kernels/call_op.h"
#include "custom_ops/kernels/op_support.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;
using ::tensorflow::errors::InvalidArgument;

tensorflow::Status ReadHalf(OpKernelConstruction* context, Half* half) {
  tensorflow::DataType type;
  TF_RETURN_IF_ERROR(context->GetAttr("dtype", &type));
  *half = type == tensorflow::DT_HALF ? Half::kFloat16 : Half::kBfloat16;
  return tensorflow::OkStatus();
}

struct HalfEncodeCall {
  Half half = Half::kFloat16;
  int64_t rows = 0, size = 0;
  const float* values = nullptr;
  int32_t* messages = nullptr;
  float* errors = nullptr;

  tensorflow::Status ReadAttributes(OpKernelConstruction* context) {
    return ReadHalf(context, &half);
  }

  tensorflow::Status Prepare(OpKernelContext* context) {
    const Tensor& input = context->input(0);
    if (input.dims() != 2 || input.dim_size(1) % 2 != 0) {
      return InvalidArgument("`values` must have shape [rows, size], of an even size. Received: ",
                             input.shape().DebugString(), ".");
    }
    rows = input.dim_size(0);
    size = input.dim_size(1);
    values = input.flat<float>().data();
    const TensorShape shape({rows, HalfWords(size)});
    TF_RETURN_IF_ERROR(AllocateOutput(context, "messages", shape, &messages));
    return ForwardOrAllocate(context, 0, 1, &errors);
  }
};

tensorflow::Status EncodeToHalves(OpKernelContext* context, const HalfEncodeCall& call) {
  EncodeHalves(call.half, call.values, call.rows, call.size, IntraOpThreads(context), call.messages,
               call.errors);
  return tensorflow::OkStatus();
}

struct HalfDecodeCall {
  Half half = Half::kFloat16;
  bool sum = false;
  int64_t rows = 0, size = 0;
  const int32_t* messages = nullptr;
  float* values = nullptr;

  tensorflow::Status ReadAttributes(OpKernelConstruction* context) {
    TF_RETURN_IF_ERROR(context->GetAttr("sum", &sum));
    return ReadHalf(context, &half);
  }

  tensorflow::Status Prepare(OpKernelContext* context) {
    const Tensor& input = context->input(0);
    if (input.dims() != 2 || input.dim_size(0) < 1 || input.dim_size(1) < 1) {
      return InvalidArgument("`messages` must have shape [rows, words], of 1 or more. Received: ",
                             input.shape().DebugString(), ".");
    }
    rows = input.dim_size(0);
    size = 2 * (input.dim_size(1) - 1);
    messages = input.flat<int32_t>().data();
    return AllocateOutput(context, "values", sum ? TensorShape({size}) : TensorShape({rows, size}),
                          &values);
  }
};

tensorflow::Status DecodeFromHalves(OpKernelContext* context, const HalfDecodeCall& call) {
  DecodeHalves(call.half, call.messages, call.rows, call.size, call.sum, IntraOpThreads(context),
               call.values);
  return tensorflow::OkStatus();
}

REGISTER_KERNEL_BUILDER(Name("RedsyncHalfEncode").Device(tensorflow::DEVICE_CPU),
                        CallOp<HalfEncodeCall, EncodeToHalves>);
REGISTER_KERNEL_BUILDER(Name("RedsyncHalfDecode").Device(tensorflow::DEVICE_CPU),
                        CallOp<HalfDecodeCall, DecodeFromHalves>);

}  // namespace
}  // namespace redsync
