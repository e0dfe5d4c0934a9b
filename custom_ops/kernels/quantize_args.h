// Attributes, inputs and outputs of the quantization ops; see call_op.h.
#ifndef TF_REDSYNC_CUSTOM_OPS_KERNELS_QUANTIZE_ARGS_H_
#define TF_REDSYNC_CUSTOM_OPS_KERNELS_QUANTIZE_ARGS_H_

#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include "custom_ops/core/cpu/quantize.h"
#include "custom_ops/core/message_layout.h"
#include "custom_ops/kernels/op_support.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {

// Values of `mode`, in the order of `Quantizer`.
constexpr const char* kModes[] = {"sign",       "two_level", "threshold",
                                  "stochastic", "uniform",   "natural"};

// Reads the attributes `mode`, `levels` and `bucket_size`; also in shape functions.
template <class Context>
tensorflow::Status ReadFormat(Context* context, QuantizeFormat* format) {
  std::string mode;
  TF_RETURN_IF_ERROR(context->GetAttr("mode", &mode));
  TF_RETURN_IF_ERROR(context->GetAttr("levels", &format->levels));
  TF_RETURN_IF_ERROR(context->GetAttr("bucket_size", &format->bucket));
  const auto* name = std::find(std::begin(kModes), std::end(kModes), mode);
  format->quantizer = static_cast<Quantizer>(name - std::begin(kModes));
  const int32_t most = MaxLevels(format->quantizer);
  if (format->levels < 1 || format->levels > most) {
    return tensorflow::errors::InvalidArgument("`levels` must be in [1, ", most, "] for mode '",
                                               mode, "'. Received: levels=", format->levels, ".");
  }
  if (format->bucket < 0 || format->bucket > kMaxBucket || format->bucket % kBucketUnit != 0) {
    return tensorflow::errors::InvalidArgument("`bucket_size` must be a positive multiple of ",
                                               kBucketUnit, ", at most ", kMaxBucket,
                                               ". Received: bucket_size=", format->bucket, ".");
  }
  return tensorflow::OkStatus();
}

// The message [flag, scales.., codes..] of several tensors.
struct QuantizedLayout {
  QuantizeFormat format;
  std::vector<int64_t> sizes, scale_offsets, code_offsets;  // One entry per tensor.
  int64_t words = kHeaderWords;

  tensorflow::Status ReadAttributes(tensorflow::OpKernelConstruction* context) {
    return ReadFormat(context, &format);
  }

  void ComputeOffsets(const tensorflow::OpInputList& tensors) {
    for (const tensorflow::Tensor& tensor : tensors) {
      sizes.push_back(tensor.NumElements());
      scale_offsets.push_back(words);
      words += format.scales(sizes.back());
    }
    for (const int64_t size : sizes) {
      code_offsets.push_back(words);
      words += format.words(size);
    }
  }

  // Returns the number of tensors.
  int count() const { return static_cast<int>(sizes.size()); }
  // Returns the number of scales of all tensors.
  int64_t scales() const { return code_offsets[0] - kHeaderWords; }
};

struct QuantizeCall : QuantizedLayout {
  std::vector<const float*> tensors;
  const float* scales_in = nullptr;
  const int32_t* stream = nullptr;  // Seed, worker and step of the random numbers.
  int32_t* message = nullptr;
  std::vector<float*> errors;  // Null if not requested.

  tensorflow::Status Prepare(tensorflow::OpKernelContext* context) {
    tensorflow::OpInputList inputs;
    const tensorflow::Tensor *scales_tensor, *numbers;
    TF_RETURN_IF_ERROR(context->input_list("tensors", &inputs));
    TF_RETURN_IF_ERROR(context->input("scales", &scales_tensor));
    TF_RETURN_IF_ERROR(context->input("stream", &numbers));
    ComputeOffsets(inputs);
    TF_RETURN_IF_ERROR(CheckVector("scales", *scales_tensor, scales()));
    TF_RETURN_IF_ERROR(CheckVector("stream", *numbers, 3));
    scales_in = scales_tensor->flat<float>().data();
    stream = numbers->flat<int32_t>().data();
    TF_RETURN_IF_ERROR(
        AllocateOutput(context, "message", tensorflow::TensorShape({words}), &message));
    errors.assign(count(), nullptr);
    for (int i = 0; i < count(); ++i) {
      tensors.push_back(inputs[i].flat<float>().data());
      if (context->num_outputs() == 1) continue;
      TF_RETURN_IF_ERROR(ForwardOrAllocate(context, i, 1 + i, &errors[i]));
    }
    return tensorflow::OkStatus();
  }
};

struct DequantizeSumCall : QuantizedLayout {
  const int32_t* messages = nullptr;
  int64_t ranks = 0;
  std::vector<float*> totals;

  tensorflow::Status Prepare(tensorflow::OpKernelContext* context) {
    tensorflow::OpInputList like;
    const tensorflow::Tensor& input = context->input(0);
    TF_RETURN_IF_ERROR(context->input_list("like", &like));
    ComputeOffsets(like);
    TF_RETURN_IF_ERROR(CheckMatrix("messages", input, kAnyRows, words));
    messages = input.flat<int32_t>().data();
    ranks = input.dim_size(0);
    totals.resize(count());
    for (int i = 0; i < count(); ++i) {
      TF_RETURN_IF_ERROR(ForwardOrAllocate(context, 1 + i, i, &totals[i]));
    }
    return tensorflow::OkStatus();
  }
};

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_KERNELS_QUANTIZE_ARGS_H_
