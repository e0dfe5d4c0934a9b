#include "custom_ops/kernels/position_args.h"

#include "custom_ops/core/cpu/bits.h"
#include "custom_ops/kernels/op_support.h"

namespace redsync {

using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;
using ::tensorflow::errors::InvalidArgument;

namespace {

constexpr int64_t kMaxFilterWords = (int64_t{1} << 27) - 1;

}  // namespace

tensorflow::Status GolombLayout::ReadAttributes(OpKernelConstruction* context) {
  int n;
  TF_RETURN_IF_ERROR(context->GetAttr("N", &n));
  TF_RETURN_IF_ERROR(ReadList(context, "sizes", n, 0, kMaxElements, &sizes));
  return ReadList(context, "rice", n, 0, kMaxRice, &rice);
}

tensorflow::Status GolombLayout::ComputeOffsets() {
  TF_RETURN_IF_ERROR(CheckList("slots", slots, sizes.size(), 0, INT32_MAX));
  for (size_t i = 0; i < sizes.size(); ++i) {
    const GolombFormat format = {sizes[i], slots[i], static_cast<int>(rice[i])};
    if (slots[i] > sizes[i] || format.words() > kMaxGolombWords) {
      return InvalidArgument(
          "`slots` must be at most `sizes`, and the code of a tensor at most 2^31 bits. "
          "Received: slots[",
          i, "]=", slots[i], ", sizes[", i, "]=", sizes[i], ", rice[", i, "]=", rice[i], ".");
    }
    formats.push_back(format);
    offsets.push_back(words);
    words += format.part_words();
  }
  return tensorflow::OkStatus();
}

tensorflow::Status PositionsOutput::Allocate(OpKernelContext* context, int64_t ranks,
                                             const std::vector<int64_t>& slots) {
  const auto n = static_cast<int64_t>(slots.size());
  tensorflow::OpOutputList indices;
  TF_RETURN_IF_ERROR(context->output_list("indices", &indices));
  TF_RETURN_IF_ERROR(AllocateOutput(context, "counts", TensorShape({ranks, n}), &counts));
  for (int64_t i = 0; i < n; ++i) {
    Tensor* tensor;
    TF_RETURN_IF_ERROR(
        indices.allocate(static_cast<int>(i), TensorShape({ranks, slots[i]}), &tensor));
    positions.push_back(Words(tensor));
  }
  return tensorflow::OkStatus();
}

tensorflow::Status GolombEncodeCall::Prepare(OpKernelContext* context) {
  const Tensor* of_each;
  TF_RETURN_IF_ERROR(ReadPositions(context, &indices, &of_each));
  counts = of_each->flat<int32_t>().data();
  for (const Tensor& tensor : indices) slots.push_back(tensor.NumElements());
  TF_RETURN_IF_ERROR(ComputeOffsets());
  return AllocateOutput(context, "message", TensorShape({words}), &message);
}

tensorflow::Status GolombDecodeCall::ReadAttributes(OpKernelConstruction* context) {
  TF_RETURN_IF_ERROR(GolombLayout::ReadAttributes(context));
  TF_RETURN_IF_ERROR(context->GetAttr("slots", &slots));
  return ComputeOffsets();
}

tensorflow::Status GolombDecodeCall::Prepare(OpKernelContext* context) {
  const Tensor& input = context->input(0);
  TF_RETURN_IF_ERROR(CheckMatrix("messages", input, kAnyRows, words));
  messages = input.flat<int32_t>().data();
  ranks = input.dim_size(0);
  return out.Allocate(context, ranks, slots);
}

tensorflow::Status BloomLayout::ReadAttributes(OpKernelConstruction* context) {
  int n;
  std::vector<int64_t> sizes, lengths, hashes;
  TF_RETURN_IF_ERROR(context->GetAttr("N", &n));
  TF_RETURN_IF_ERROR(ReadList(context, "sizes", n, 0, kMaxElements, &sizes));
  TF_RETURN_IF_ERROR(ReadList(context, "words", n, 1, kMaxFilterWords, &lengths));
  TF_RETURN_IF_ERROR(ReadList(context, "hashes", n, 1, kMaxHashes, &hashes));
  for (int i = 0; i < n; ++i) {
    formats.push_back({sizes[i], lengths[i], static_cast<int>(hashes[i]), 0});
    offsets.push_back(words);
    words += lengths[i];
  }
  return tensorflow::OkStatus();
}

tensorflow::Status BloomLayout::ReadSeed(OpKernelContext* context) {
  const Tensor* scalar;
  TF_RETURN_IF_ERROR(ReadScalar(context, "seed", &scalar));
  seed = scalar->scalar<int32_t>().data();
  return tensorflow::OkStatus();
}

tensorflow::Status BloomBuildCall::Prepare(OpKernelContext* context) {
  const Tensor* of_each;
  TF_RETURN_IF_ERROR(ReadPositions(context, &indices, &of_each));
  TF_RETURN_IF_ERROR(ReadSeed(context));
  counts = of_each->flat<int32_t>().data();
  return AllocateOutput(context, "filters", TensorShape({words}), &filters);
}

tensorflow::Status BloomQueryCall::ReadAttributes(OpKernelConstruction* context) {
  TF_RETURN_IF_ERROR(BloomLayout::ReadAttributes(context));
  return ReadList(context, "slots", formats.size(), 0, INT32_MAX, &slots);
}

tensorflow::Status BloomQueryCall::Prepare(OpKernelContext* context) {
  const Tensor& input = context->input(0);
  TF_RETURN_IF_ERROR(ReadSeed(context));
  TF_RETURN_IF_ERROR(CheckMatrix("filters", input, kAnyRows, words));
  filters = input.flat<int32_t>().data();
  ranks = input.dim_size(0);
  return out.Allocate(context, ranks, slots);
}

}  // namespace redsync
