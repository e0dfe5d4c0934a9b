#include <algorithm>

#include "custom_ops/core/cpu/halves.h"
#include "custom_ops/kernels/call_op.h"
#include "custom_ops/kernels/op_support.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpInputList;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;
using ::tensorflow::errors::InvalidArgument;

// Common part of the three ops: the dtype, and the tensors of a vector.
struct HalfCall {
  Half half = Half::kFloat16;
  int64_t blocks = 0, size = 0;
  std::vector<HalfTensor> tensors;
  int64_t elements = 0;

  tensorflow::Status ReadAttributes(OpKernelConstruction* context) {
    tensorflow::DataType type;
    TF_RETURN_IF_ERROR(context->GetAttr("dtype", &type));
    half = type == tensorflow::DT_HALF ? Half::kFloat16 : Half::kBfloat16;
    return tensorflow::OkStatus();
  }

  // Checks `messages`, [any, words], for a vector of `count` blocks; fills `size`.
  tensorflow::Status ReadMessages(const Tensor& messages, int64_t count) {
    if (messages.dims() != 2 || messages.dim_size(0) < 1 || messages.dim_size(1) < 1 ||
        messages.dim_size(1) != HalfWords(HalfBlock(elements, count))) {
      return InvalidArgument("`messages` must have the shape [blocks, words] of ", elements,
                             " elements. Received: ", messages.shape().DebugString(), ".");
    }
    size = 2 * (messages.dim_size(1) - 1);
    return tensorflow::OkStatus();
  }

  void Append(const HalfTensor& tensor) {
    tensors.push_back(tensor);
    elements += tensor.size;
  }
};

struct HalfEncodeCall : HalfCall {
  int32_t* messages = nullptr;

  tensorflow::Status ReadAttributes(OpKernelConstruction* context) {
    TF_RETURN_IF_ERROR(ReadInt(context, "blocks", 1, INT32_MAX, &blocks));
    return HalfCall::ReadAttributes(context);
  }

  tensorflow::Status Prepare(OpKernelContext* context) {
    OpInputList values, residuals;
    TF_RETURN_IF_ERROR(context->input_list("values", &values));
    TF_RETURN_IF_ERROR(context->input_list("residuals", &residuals));
    const int n = values.size();
    if (residuals.size() != 0 && residuals.size() != n) {
      return InvalidArgument("`residuals` must be none or ", n,
                             " tensors. Received: ", residuals.size(), ".");
    }
    for (int i = 0; i < n; ++i) {
      const bool has_residual = residuals.size() > 0;
      if (has_residual && residuals[i].shape() != values[i].shape()) {
        return InvalidArgument("`residuals` must have the shapes of `values`. Received: ",
                               residuals[i].shape().DebugString(), " and ",
                               values[i].shape().DebugString(), " for tensor ", i, ".");
      }
      HalfTensor tensor{values[i].NumElements(), values[i].flat<float>().data(),
                        has_residual ? residuals[i].flat<float>().data() : nullptr};
      Tensor* errors;
      const std::vector<int> inputs =
          has_residual ? std::vector<int>{i, n + i} : std::vector<int>{i};
      TF_RETURN_IF_ERROR(
          context->forward_input_or_allocate_output(inputs, 1 + i, values[i].shape(), &errors));
      tensor.errors = errors->flat<float>().data();
      Append(tensor);
    }
    size = HalfBlock(elements, blocks);
    return AllocateOutput(context, "messages", TensorShape({blocks, HalfWords(size)}), &messages);
  }
};

tensorflow::Status EncodeToHalves(OpKernelContext* context, const HalfEncodeCall& call) {
  EncodeHalves(call.half, call.tensors, call.blocks, call.size, IntraOpThreads(context),
               call.messages);
  return tensorflow::OkStatus();
}

struct HalfReduceCall : HalfCall {
  const int32_t* messages = nullptr;
  int64_t block = 0;
  int32_t* message = nullptr;

  tensorflow::Status Prepare(OpKernelContext* context) {
    OpInputList errors;
    const Tensor* rank;
    TF_RETURN_IF_ERROR(context->input_list("errors", &errors));
    TF_RETURN_IF_ERROR(ReadScalar(context, "block", &rank));
    for (int i = 0; i < errors.size(); ++i) {
      HalfTensor tensor{errors[i].NumElements()};
      TF_RETURN_IF_ERROR(ForwardOrAllocate(context, 1 + i, 1 + i, &tensor.errors));
      const float* before = errors[i].flat<float>().data();
      if (tensor.errors != before) std::copy_n(before, tensor.size, tensor.errors);
      Append(tensor);
    }
    const Tensor& input = context->input(0);
    blocks = input.dims() > 0 ? input.dim_size(0) : 0;
    TF_RETURN_IF_ERROR(ReadMessages(input, std::max<int64_t>(blocks, 1)));
    block = rank->scalar<int32_t>()();
    if (block < 0 || block >= blocks) {
      return InvalidArgument("`block` must be in [0, ", blocks, "). Received: ", block, ".");
    }
    messages = input.flat<int32_t>().data();
    return AllocateOutput(context, "message", TensorShape({input.dim_size(1)}), &message);
  }
};

tensorflow::Status SumHalfMessages(OpKernelContext* context, const HalfReduceCall& call) {
  ReduceHalves(call.half, call.messages, call.blocks, call.size, call.block, call.tensors,
               IntraOpThreads(context), call.message);
  return tensorflow::OkStatus();
}

struct HalfDecodeCall : HalfCall {
  const int32_t* messages = nullptr;

  tensorflow::Status Prepare(OpKernelContext* context) {
    const Tensor& input = context->input(0);
    const Tensor& sizes = context->input(1);
    TF_RETURN_IF_ERROR(CheckVector("sizes", sizes, context->num_outputs()));
    for (int i = 0; i < context->num_outputs(); ++i) {
      const int64_t count = sizes.vec<int64_t>()(i);
      if (count < 0 || count > INT64_MAX / 8 - elements) {
        return InvalidArgument("`sizes` must be at least 0. Received: ", count, ".");
      }
      Append({count});
    }
    blocks = input.dims() > 0 ? input.dim_size(0) : 0;
    TF_RETURN_IF_ERROR(ReadMessages(input, std::max<int64_t>(blocks, 1)));
    for (int i = 0; i < context->num_outputs(); ++i) {
      Tensor* output;
      TF_RETURN_IF_ERROR(context->allocate_output(i, TensorShape({tensors[i].size}), &output));
      tensors[i].errors = output->flat<float>().data();
    }
    messages = input.flat<int32_t>().data();
    return tensorflow::OkStatus();
  }
};

tensorflow::Status DecodeFromHalves(OpKernelContext* context, const HalfDecodeCall& call) {
  DecodeHalves(call.half, call.messages, call.blocks, call.size, call.tensors,
               IntraOpThreads(context));
  return tensorflow::OkStatus();
}

REGISTER_KERNEL_BUILDER(Name("RedsyncHalfEncode").Device(tensorflow::DEVICE_CPU),
                        CallOp<HalfEncodeCall, EncodeToHalves>);
REGISTER_KERNEL_BUILDER(Name("RedsyncHalfReduce").Device(tensorflow::DEVICE_CPU),
                        CallOp<HalfReduceCall, SumHalfMessages>);
REGISTER_KERNEL_BUILDER(Name("RedsyncHalfDecode").Device(tensorflow::DEVICE_CPU),
                        CallOp<HalfDecodeCall, DecodeFromHalves>);

}  // namespace
}  // namespace redsync
