// Attributes and message of the quantisation ops, the same on all devices.
#ifndef TF_REDSYNC_CUSTOM_OPS_KERNELS_QUANTIZE_ARGS_H_
#define TF_REDSYNC_CUSTOM_OPS_KERNELS_QUANTIZE_ARGS_H_

#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include "custom_ops/core/cpu/quantize.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {

// Values of `mode`, in the order of `Quantizer`.
constexpr const char* kModes[] = {"sign",       "two_level", "threshold",
                                  "stochastic", "uniform",   "natural"};

// The attributes `mode`, `levels` and `bucket_size`; also for inferring shapes.
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
  if (format->bucket < 0 || format->bucket % kBucketUnit != 0) {
    return tensorflow::errors::InvalidArgument("`bucket_size` must be a positive multiple of ",
                                               kBucketUnit,
                                               ". Received: bucket_size=", format->bucket, ".");
  }
  return tensorflow::OkStatus();
}

// Where the scales and codes of the tensors lie in a message: [flag, scales.., codes..].
struct QuantizeLayout {
  std::vector<int64_t> scales_at, words_at;
  int64_t words = 1;

  QuantizeLayout(const QuantizeFormat& format, const tensorflow::OpInputList& tensors) {
    for (int i = 0; i < tensors.size(); ++i) {
      scales_at.push_back(words);
      words += format.scales(tensors[i].NumElements());
    }
    for (int i = 0; i < tensors.size(); ++i) {
      words_at.push_back(words);
      words += format.words(tensors[i].NumElements());
    }
  }
  int64_t scales() const { return words_at[0] - 1; }
};

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_KERNELS_QUANTIZE_ARGS_H_
