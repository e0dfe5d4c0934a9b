// Accumulate-and-select on one tensor.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_CPU_SELECT_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_CPU_SELECT_H_

#include <cstdint>

#include "custom_ops/core/cpu/common.h"
#include "custom_ops/core/cpu/pass.h"

namespace redsync {

// kFixed takes the elements that reach an absolute threshold, given as the ratio; `k` is its
// capacity.
enum class Selector { kExact, kTrimmed, kThreshold, kFixed };

struct SelectOptions {
  int64_t size = 0;  // Elements, at most kMaxElements.
  int64_t k = 0;     // In [1, size], at most 2^31 - 1; 0 if size is 0.
  Selector selector = Selector::kExact;
  bool quantized = false;
  Momentum momentum = Momentum::kNone;
  float factor = 0;  // Momentum coefficient.
  AdamFactors adam;
  bool masking = true;
  bool clear_residual = true;  // Whether selected elements of the residual are set to zero.
  float scale = 1;
  bool positive_side = true;  // Whether a quantized tensor sends positive elements.
  bool search = true;         // Whether to bisect again, or else reuse `ratio`.
  float ratio = -1;           // Ratio of kThreshold's last search; for kFixed the threshold, >= 0.
};

struct SelectBuffers {
  const float* grad = nullptr;
  const uint16_t* bfloat16_grad = nullptr;  // Replaces `grad` if not null.
  const float* residual = nullptr;
  const float* velocity = nullptr;  // Null without momentum.
  float* new_residual = nullptr;    // May be `residual` or `grad`.
  float* new_velocity = nullptr;    // May be `velocity` or `grad`; null if it is not stored.
  uint32_t* indices = nullptr;      // [k]; the first `count` are written.
  int32_t* values = nullptr;        // [k], bits of floats; null if quantized.
};

struct SelectResult {
  // Whether all accumulated elements are below 2^96 in magnitude, and kFixed's threshold is no NaN.
  bool finite = true;
  int64_t count = 0;
  float mean = 0;  // Mean of the selected elements, if quantized.
  float ratio = -1;
};

// Returns the bytes of scratch memory of AccumulateAndSelect, which is aligned like a double.
int64_t SelectScratchBytes(int64_t size, int64_t k, Selector selector);

// Accumulates the gradient, selects, and zeroes the selected elements. If `result->finite` is
// false, the outputs are unspecified, and `count` is 0.
Status AccumulateAndSelect(const SelectOptions& options, const SelectBuffers& buffers,
                           void* scratch, int64_t scratch_bytes, const ParallelFor& parallel_for,
                           SelectResult* result);

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_CPU_SELECT_H_
