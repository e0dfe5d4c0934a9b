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

tensorflow::Status TopKAttributes::Read(OpKernelConstruction* context, size_t n) {
  TF_RETURN_IF_ERROR(context->GetAttr("k", &k));
  TF_RETURN_IF_ERROR(context->GetAttr("streams", &streams));
  TF_RETURN_IF_ERROR(context->GetAttr("rice", &rice));
  TF_RETURN_IF_ERROR(context->GetAttr("value_bits", &value_bits));
  TF_RETURN_IF_ERROR(CheckList("k", k, n, 0, INT32_MAX));
  TF_RETURN_IF_ERROR(CheckList("rice", rice, rice.size(), 0, kMaxRice));
  const int64_t last = static_cast<int64_t>(rice.size()) - 1;
  TF_RETURN_IF_ERROR(CheckList("streams", streams, n, 0, last));
  if ((value_bits >= 1 && value_bits <= kMaxLevelBits) || value_bits == kHalfBits) {
    return tensorflow::OkStatus();
  }
  return InvalidArgument("`value_bits` must be in [1, ", kMaxLevelBits, "] or ", kHalfBits,
                         ". Received: value_bits=", value_bits, ".");
}

tensorflow::Status TopKAttributes::Lay(const std::vector<int64_t>& sizes, TopKFormat* format,
                                       std::vector<TopKTensor>* tensors) const {
  format->value_bits = value_bits;
  for (const int64_t bits : rice) format->streams.push_back({0, 0, static_cast<int>(bits)});
  for (size_t i = 0; i < sizes.size(); ++i) {
    TopKTensor tensor;
    tensor.size = sizes[i];
    tensor.slots = k[i];
    tensor.stream = streams[i];
    if (tensor.slots < std::min<int64_t>(tensor.size, 1) || tensor.slots > tensor.size) {
      return InvalidArgument("`k` must be in [1, size] (0 for an empty tensor). Received: k[", i,
                             "]=", k[i], " for a tensor of ", sizes[i], " elements.");
    }
    GolombFormat& stream = format->streams[tensor.stream];
    stream.size += tensor.size;
    stream.slots += tensor.slots;
    tensors->push_back(tensor);
  }
  for (const GolombFormat& stream : format->streams) {
    if (stream.size <= INT32_MAX && stream.words() <= kMaxGolombWords) continue;
    return InvalidArgument(
        "Tensors of a stream must have at most ", INT32_MAX,
        " elements together, and the code of their positions 2^31 bits. Received: ", stream.size,
        " elements, of which ", stream.slots, " are selected.");
  }
  return tensorflow::OkStatus();
}

tensorflow::Status SelectAndCodeAttributes::Read(OpKernelConstruction* context) {
  int n;
  TF_RETURN_IF_ERROR(MomentumAttributes::Read(context));
  TF_RETURN_IF_ERROR(context->GetAttr("N", &n));
  return TopKAttributes::Read(context, n);
}

tensorflow::Status SelectAndCodeAttributes::Lay(const tensorflow::OpInputList& grads,
                                                TopKFormat* format,
                                                std::vector<TopKTensor>* tensors) const {
  std::vector<int64_t> sizes;
  for (const Tensor& grad : grads) sizes.push_back(grad.NumElements());
  return TopKAttributes::Lay(sizes, format, tensors);
}

tensorflow::Status DecodeTopKCall::Read(OpKernelConstruction* context) {
  TopKAttributes attributes;
  std::vector<int64_t> sizes;
  TF_RETURN_IF_ERROR(context->GetAttr("sizes", &sizes));
  TF_RETURN_IF_ERROR(CheckList("sizes", sizes, sizes.size(), 0, INT32_MAX));
  TF_RETURN_IF_ERROR(attributes.Read(context, sizes.size()));
  TF_RETURN_IF_ERROR(attributes.Lay(sizes, &format, &tensors));
  words = format.words(tensors.data(), static_cast<int64_t>(tensors.size()));
  plain_words = kFlagWords;
  for (const TopKTensor& tensor : tensors) {
    plain_words += PartWords(false, tensor.slots);
    slots += tensor.slots;
  }
  return tensorflow::OkStatus();
}

tensorflow::Status DecodeTopKCall::Prepare(OpKernelContext* context) {
  const Tensor& input = context->input(0);
  TF_RETURN_IF_ERROR(CheckShape("messages", input, -1, words));
  ranks = input.dim_size(0);
  messages = input.flat<int32_t>().data();
  Tensor* output;
  TF_RETURN_IF_ERROR(context->allocate_output("plain", TensorShape({ranks, plain_words}), &output));
  plain = output->flat<int32_t>().data();
  return tensorflow::OkStatus();
}

}  // namespace redsync
