#include "custom_ops/kernels/topk_args.h"

#include <algorithm>

#include "custom_ops/core/cpu/bits.h"
#include "custom_ops/core/message_layout.h"
#include "custom_ops/kernels/op_support.h"

namespace redsync {

using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;
using ::tensorflow::errors::InvalidArgument;

tensorflow::Status TopKCall::ReadAttributes(OpKernelConstruction* context, size_t n) {
  TF_RETURN_IF_ERROR(context->GetAttr("rice", &rice));
  TF_RETURN_IF_ERROR(context->GetAttr("value_bits", &value_bits));
  TF_RETURN_IF_ERROR(CheckList("rice", rice, rice.size(), 0, kMaxRice));
  TF_RETURN_IF_ERROR(ReadList(context, "k", n, 0, INT32_MAX, &k));
  const int64_t last = static_cast<int64_t>(rice.size()) - 1;
  TF_RETURN_IF_ERROR(ReadList(context, "streams", n, 0, last, &streams));
  if ((value_bits >= 1 && value_bits <= kMaxLevelBits) || value_bits == kHalfBits) {
    return tensorflow::OkStatus();
  }
  return InvalidArgument("`value_bits` must be in [1, ", kMaxLevelBits, "] or ", kHalfBits,
                         ". Received: value_bits=", value_bits, ".");
}

tensorflow::Status TopKCall::ComputeFormat(const std::vector<int64_t>& sizes) {
  format.value_bits = value_bits;
  for (const int64_t bits : rice) format.streams.push_back({0, 0, static_cast<int>(bits)});
  for (size_t i = 0; i < sizes.size(); ++i) {
    TopKTensor tensor;
    tensor.size = sizes[i];
    tensor.slots = k[i];
    tensor.stream = streams[i];
    if (tensor.slots < std::min<int64_t>(tensor.size, 1) || tensor.slots > tensor.size) {
      return InvalidArgument("`k` must be in [1, size] (0 for an empty tensor). Received: k[", i,
                             "]=", k[i], " for a tensor of ", sizes[i], " elements.");
    }
    GolombFormat& stream = format.streams[tensor.stream];
    stream.size += tensor.size;
    stream.slots += tensor.slots;
    slots += tensor.slots;
    tensors.push_back(tensor);
  }
  for (const GolombFormat& stream : format.streams) {
    if (stream.size <= INT32_MAX && stream.words() <= kMaxGolombWords) continue;
    return InvalidArgument(
        "Tensors of a stream must have at most ", INT32_MAX,
        " elements together, and the code of their positions 2^31 bits. Received: ", stream.size,
        " elements, of which ", stream.slots, " are selected.");
  }
  words = format.words(tensors.data(), static_cast<int64_t>(tensors.size()));
  return tensorflow::OkStatus();
}

tensorflow::Status SelectAndCodeCall::ReadAttributes(OpKernelConstruction* context) {
  int n;
  TF_RETURN_IF_ERROR(context->GetAttr("epsilon", &epsilon));
  TF_RETURN_IF_ERROR(AccumulateCall::ReadAttributes(context, epsilon != 0));
  TF_RETURN_IF_ERROR(context->GetAttr("N", &n));
  return TopKCall::ReadAttributes(context, n);
}

tensorflow::Status SelectAndCodeCall::Prepare(OpKernelContext* context) {
  TF_RETURN_IF_ERROR(ReadInputs(context));
  TF_RETURN_IF_ERROR(context->input("adam", &adam));
  TF_RETURN_IF_ERROR(CheckMatrix("adam", *adam, epsilon == 0 ? 0 : grads.size(), 3));
  std::vector<int64_t> sizes;
  for (const Tensor& grad : grads) sizes.push_back(grad.NumElements());
  TF_RETURN_IF_ERROR(ComputeFormat(sizes));
  TF_RETURN_IF_ERROR(AllocateOutput(context, "message", TensorShape({words}), &message));
  TF_RETURN_IF_ERROR(AllocateState(context));
  for (size_t i = 0; i < tensors.size(); ++i) {
    tensors[i].residual = new_residuals[i]->flat<float>().data();
  }
  return tensorflow::OkStatus();
}

AdamFactors SelectAndCodeCall::AdamOf(size_t i) const {
  if (momentum != Momentum::kAdam) return {};
  const auto factors = adam->matrix<float>();
  return {factors(i, 0), factors(i, 1), factors(i, 2), epsilon};
}

tensorflow::Status DecodeTopKCall::ReadAttributes(OpKernelConstruction* context) {
  std::vector<int64_t> sizes;
  TF_RETURN_IF_ERROR(context->GetAttr("sizes", &sizes));
  TF_RETURN_IF_ERROR(CheckList("sizes", sizes, sizes.size(), 0, INT32_MAX));
  TF_RETURN_IF_ERROR(TopKCall::ReadAttributes(context, sizes.size()));
  TF_RETURN_IF_ERROR(ComputeFormat(sizes));
  plain_words = kHeaderWords;
  for (const TopKTensor& tensor : tensors) plain_words += PartWords(false, tensor.slots);
  return tensorflow::OkStatus();
}

tensorflow::Status DecodeTopKCall::Prepare(OpKernelContext* context) {
  const Tensor& input = context->input(0);
  TF_RETURN_IF_ERROR(CheckMatrix("messages", input, kAnyRows, words));
  ranks = input.dim_size(0);
  messages = input.flat<int32_t>().data();
  return AllocateOutput(context, "plain", TensorShape({ranks, plain_words}), &plain);
}

}  // namespace redsync
