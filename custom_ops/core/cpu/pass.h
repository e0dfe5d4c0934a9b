// The passes over memory: accumulate and collect candidates, and scan for candidates again.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_CPU_PASS_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_CPU_PASS_H_

#include <cstdint>

#include "custom_ops/core/cpu/candidates.h"
#include "custom_ops/core/cpu/common.h"

namespace redsync {

// kUnkept is kPlain without storing the new velocity. With kAdam the velocity is Adam's second
// moment.
enum class Momentum { kNone, kPlain, kNesterov, kUnkept, kAdam };

// Returns whether the new velocity is stored.
constexpr bool Keeps(Momentum momentum) {
  return momentum != Momentum::kNone && momentum != Momentum::kUnkept;
}

// Of kAdam: u' = keep u + gain t^2 and v' = v + t / (sqrt(keep u + own t^2) + epsilon), with
// t = scale g and own <= gain.
struct AdamFactors {
  float keep = 0, gain = 0, own = 0, epsilon = 0;
};

// Elements of a block. Sums are taken per block and then over blocks in order, so results do not
// depend on the assignment of blocks to threads.
constexpr int64_t kBlock = 16384;

// Magnitude of an element, as a comparable int32: the bits of |v|, or of v or -v if one sign is
// selected. An element is eligible if its magnitude is > 0; denormals do not occur (see common.h).
struct Magnitude {
  int32_t keep;  // Mask of the bits that are kept.
  int32_t flip;  // Mask of the bits that are inverted.
  int32_t operator()(int32_t bits) const { return (bits & keep) ^ flip; }
  static Magnitude Absolute() { return {0x7fffffff, 0}; }
  static Magnitude OfSide(bool positive) {
    return {-1, positive ? 0 : static_cast<int32_t>(0x80000000u)};
  }
};

struct PassArgs {
  Momentum momentum = Momentum::kNone;
  bool need_sum = false;  // Whether to compute BlockStats.sum.
  // Whether stores may bypass the caches, if outputs do not share memory with inputs.
  bool bypass_caches = false;
  float factor = 0;  // Momentum coefficient.
  AdamFactors adam;
  float scale = 1;  // Factor of the gradient.
  Magnitude magnitude = Magnitude::Absolute();
  int32_t threshold = 0;  // Candidates have a magnitude > threshold >= 0.
  const float* grad = nullptr;
  const uint16_t* bfloat16_grad = nullptr;  // Replaces `grad` if not null.
  const float* residual = nullptr;
  const float* velocity = nullptr;  // Null without momentum.
  float* new_residual = nullptr;    // May be `residual` or `grad`.
  float* new_velocity = nullptr;    // May be `velocity` or `grad`; null if it is not stored.
};

// Returns the float whose upper half are the bfloat16 bits.
inline float Widened(uint16_t bits) { return FloatOf(static_cast<int32_t>(uint32_t{bits} << 16)); }

struct BlockStats {
  double sum;            // Sum of the magnitudes as floats (signed if one sign is selected).
  int32_t max;           // Maximum of the magnitudes.
  int32_t max_absolute;  // Maximum of the bits of the absolute values; large if a u' is infinite.
};

// Accumulates elements [begin, end), fills stats[0 .. blocks) and appends candidates to `pool`.
// `begin` is a multiple of kBlock.
using AccumulateFunction = void (*)(const PassArgs& args, int64_t begin, int64_t end,
                                    BlockStats* stats, CandidatePool* pool);
// Appends the candidates among elements [begin, end) of `values`.
using ScanFunction = void (*)(const float* values, Magnitude magnitude, int32_t threshold,
                              int64_t begin, int64_t end, CandidatePool* pool);

struct PassFunctions {
  const char* name;  // "plain", "avx2" or "avx512".
  AccumulateFunction accumulate;
  ScanFunction scan;
};

// Returns the fastest version for this CPU (see simd.h). All versions give the same bits.
const PassFunctions& Passes();

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_CPU_PASS_H_
