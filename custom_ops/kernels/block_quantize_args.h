// Attributes, inputs and outputs of the ops of block quantization; see call_op.h.
#ifndef TF_REDSYNC_CUSTOM_OPS_KERNELS_BLOCK_QUANTIZE_ARGS_H_
#define TF_REDSYNC_CUSTOM_OPS_KERNELS_BLOCK_QUANTIZE_ARGS_H_

#include "custom_ops/core/cpu/block_quantize.h"
#include "custom_ops/kernels/op_support.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {

// Reads the attributes `bits` and `block`; also in shape functions.
template <class Context>
tensorflow::Status ReadBlockFormat(Context* context, BlockFormat* format) {
  TF_RETURN_IF_ERROR(context->GetAttr("bits", &format->bits));
  TF_RETURN_IF_ERROR(context->GetAttr("block", &format->block));
  const int64_t bits = format->bits, block = format->block;
  if (bits != 8 && bits != 4 && bits != 2) {
    return tensorflow::errors::InvalidArgument("`bits` must be 8, 4 or 2. Received: bits=", bits,
                                               ".");
  }
  if (block < 1 || block % kBlockUnit != 0 || block > INT32_MAX) {
    return tensorflow::errors::InvalidArgument("`block` must be a positive multiple of ",
                                               kBlockUnit, ", at most ", INT32_MAX,
                                               ". Received: block=", block, ".");
  }
  return tensorflow::OkStatus();
}

inline tensorflow::Status CheckRowSize(int64_t size) {
  if (size >= 0 && size % kBlockUnit == 0) return tensorflow::OkStatus();
  return tensorflow::errors::InvalidArgument("Rows must have a multiple of ", kBlockUnit,
                                             " elements. Received: rows of ", size, ".");
}

struct BlockQuantizeCall {
  BlockFormat format;
  int64_t rows = 0, size = 0;
  const float* values = nullptr;
  int32_t* messages = nullptr;
  float* errors = nullptr;

  tensorflow::Status ReadAttributes(tensorflow::OpKernelConstruction* context) {
    return ReadBlockFormat(context, &format);
  }

  tensorflow::Status Prepare(tensorflow::OpKernelContext* context) {
    const tensorflow::Tensor& input = context->input(0);
    if (input.dims() != 2) {
      return tensorflow::errors::InvalidArgument(
          "`values` must have shape [rows, size]. Received: ", input.shape().DebugString(), ".");
    }
    rows = input.dim_size(0);
    size = input.dim_size(1);
    TF_RETURN_IF_ERROR(CheckRowSize(size));
    values = input.flat<float>().data();
    const tensorflow::TensorShape shape({rows, format.words(size)});
    TF_RETURN_IF_ERROR(AllocateOutput(context, "messages", shape, &messages));
    return ForwardOrAllocate(context, 0, 1, &errors);
  }
};

struct BlockDequantizeCall {
  BlockFormat format;
  bool sum = false;
  int64_t rows = 0, size = 0;
  const int32_t* messages = nullptr;
  float* values = nullptr;

  tensorflow::Status ReadAttributes(tensorflow::OpKernelConstruction* context) {
    TF_RETURN_IF_ERROR(context->GetAttr("sum", &sum));
    return ReadBlockFormat(context, &format);
  }

  tensorflow::Status Prepare(tensorflow::OpKernelContext* context) {
    const tensorflow::Tensor* scalar;
    TF_RETURN_IF_ERROR(ReadScalar(context, "size", &scalar));
    size = scalar->scalar<int64_t>()();
    TF_RETURN_IF_ERROR(CheckRowSize(size));
    const tensorflow::Tensor& input = context->input(0);
    TF_RETURN_IF_ERROR(CheckMatrix("messages", input, kAnyRows, format.words(size)));
    rows = input.dim_size(0);
    messages = input.flat<int32_t>().data();
    const auto shape =
        sum ? tensorflow::TensorShape({size}) : tensorflow::TensorShape({rows, size});
    return AllocateOutput(context, "values", shape, &values);
  }
};

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_KERNELS_BLOCK_QUANTIZE_ARGS_H_
