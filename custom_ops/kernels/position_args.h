// Attributes and messages of the ops on positions, the same on all devices.
#ifndef TF_REDSYNC_CUSTOM_OPS_KERNELS_POSITION_ARGS_H_
#define TF_REDSYNC_CUSTOM_OPS_KERNELS_POSITION_ARGS_H_

#include <vector>

#include "custom_ops/core/cpu/bits.h"
#include "custom_ops/core/cpu/bloom.h"
#include "custom_ops/core/cpu/golomb.h"
#include "custom_ops/kernels/op_support.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {

constexpr int64_t kMaxFilterWords = (int64_t{1} << 27) - 1;

// The formats of the tensors and where their parts lie.
struct GolombLayout {
  std::vector<int64_t> sizes, rice, slots;
  std::vector<GolombFormat> of;
  std::vector<int64_t> at;
  int64_t words = 0;

  tensorflow::Status Read(tensorflow::OpKernelConstruction* context) {
    int n;
    TF_RETURN_IF_ERROR(context->GetAttr("N", &n));
    TF_RETURN_IF_ERROR(context->GetAttr("sizes", &sizes));
    TF_RETURN_IF_ERROR(context->GetAttr("rice", &rice));
    TF_RETURN_IF_ERROR(CheckList("sizes", sizes, n, 0, kMaxElements));
    return CheckList("rice", rice, n, 0, kMaxRice);
  }

  // Completes the formats with the numbers of slots.
  tensorflow::Status Lay() {
    TF_RETURN_IF_ERROR(CheckList("slots", slots, sizes.size(), 0, INT32_MAX));
    for (size_t i = 0; i < sizes.size(); ++i) {
      const GolombFormat format = {sizes[i], slots[i], static_cast<int>(rice[i])};
      if (slots[i] > sizes[i] || format.words() > kMaxGolombWords) {
        return tensorflow::errors::InvalidArgument(
            "`slots` must be at most `sizes`, and the code of a tensor at most 2^31 bits. "
            "Received: slots[",
            i, "]=", slots[i], ", sizes[", i, "]=", sizes[i], ", rice[", i, "]=", rice[i], ".");
      }
      of.push_back(format);
      at.push_back(words);
      words += 2 + format.words();
    }
    return tensorflow::OkStatus();
  }
};

// The filters of the tensors, one after the other.
struct BloomLayout {
  std::vector<BloomFormat> of;
  std::vector<int64_t> at;
  int64_t words = 0;

  tensorflow::Status Read(tensorflow::OpKernelConstruction* context) {
    int n;
    std::vector<int64_t> sizes, lengths, hashes;
    TF_RETURN_IF_ERROR(context->GetAttr("N", &n));
    TF_RETURN_IF_ERROR(context->GetAttr("sizes", &sizes));
    TF_RETURN_IF_ERROR(context->GetAttr("words", &lengths));
    TF_RETURN_IF_ERROR(context->GetAttr("hashes", &hashes));
    TF_RETURN_IF_ERROR(CheckList("sizes", sizes, n, 0, kMaxElements));
    TF_RETURN_IF_ERROR(CheckList("words", lengths, n, 1, kMaxFilterWords));
    TF_RETURN_IF_ERROR(CheckList("hashes", hashes, n, 1, kMaxHashes));
    for (int i = 0; i < n; ++i) {
      of.push_back({sizes[i], lengths[i], static_cast<int>(hashes[i]), 0});
      at.push_back(words);
      words += lengths[i];
    }
    return tensorflow::OkStatus();
  }
};

// Allocates the outputs `indices` [ranks, slots] and `counts` [ranks, tensors].
inline tensorflow::Status AllocatePositions(tensorflow::OpKernelContext* context, int64_t ranks,
                                            const std::vector<int64_t>& slots,
                                            std::vector<uint32_t*>* positions,
                                            tensorflow::Tensor** counts) {
  const int64_t n = slots.size();
  tensorflow::OpOutputList indices;
  TF_RETURN_IF_ERROR(context->output_list("indices", &indices));
  TF_RETURN_IF_ERROR(
      context->allocate_output("counts", tensorflow::TensorShape({ranks, n}), counts));
  for (int64_t i = 0; i < n; ++i) {
    tensorflow::Tensor* tensor;
    TF_RETURN_IF_ERROR(indices.allocate(i, tensorflow::TensorShape({ranks, slots[i]}), &tensor));
    positions->push_back(Words(tensor));
  }
  return tensorflow::OkStatus();
}

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_KERNELS_POSITION_ARGS_H_
