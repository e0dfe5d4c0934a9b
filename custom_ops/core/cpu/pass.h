// The passes over memory: accumulate (and notice what may be selected), and scan once more.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_CPU_PASS_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_CPU_PASS_H_

#include <cstdint>

#include "custom_ops/core/cpu/candidates.h"
#include "custom_ops/core/cpu/common.h"

namespace redsync {

// kUnkept is kPlain without the new velocity.
enum class Momentum { kNone, kPlain, kNesterov, kUnkept };

// Whether there is a new velocity.
constexpr bool Keeps(Momentum momentum) {
  return momentum == Momentum::kPlain || momentum == Momentum::kNesterov;
}

// Elements a block holds. Sums are taken per block and then over blocks in order, so results do not
// depend on how blocks are spread over threads.
constexpr int64_t kBlock = 16384;

// Magnitude of an element, as a comparable int32: the bits of |v|, or of v or -v for one side.
// An element is eligible if its magnitude is > 0; denormals do not occur (see common.h).
struct Magnitude {
  int32_t keep;  // Bits that stay.
  int32_t flip;  // Bits that are inverted.
  int32_t operator()(int32_t bits) const { return (bits & keep) ^ flip; }
  static Magnitude Absolute() { return {0x7fffffff, 0}; }
  static Magnitude OfSide(bool positive) {
    return {-1, positive ? 0 : static_cast<int32_t>(0x80000000u)};
  }
};

struct PassArgs {
  Momentum momentum = Momentum::kNone;
  bool need_sum = false;  // Whether BlockStats.sum is wanted.
  // Whether results may be stored past the caches, if they have memory of their own.
  bool bypass_caches = false;
  float factor = 0;  // Of the momentum.
  float scale = 1;   // Of the gradient.
  Magnitude magnitude = Magnitude::Absolute();
  int32_t threshold = 0;  // Candidates have a magnitude > threshold >= 0.
  const float* grad = nullptr;
  const uint16_t* bfloat16_grad = nullptr;  // In place of `grad`, if not null.
  const float* residual = nullptr;
  const float* velocity = nullptr;  // Null without momentum.
  float* new_residual = nullptr;    // May be `residual` or `grad`.
  float* new_velocity = nullptr;    // May be `velocity` or `grad`; null if it is not kept.
};

// The number of which bfloat16 bits are the upper half.
inline float Widened(uint16_t bits) { return FloatOf(static_cast<int32_t>(uint32_t{bits} << 16)); }

struct BlockStats {
  double sum;            // Of the magnitudes as floats (signed for one side).
  int32_t max;           // Of the magnitudes.
  int32_t max_absolute;  // Of the absolute values' bits.
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

// The fastest version that this CPU runs (see simd.h). All versions give the same bits.
const PassFunctions& Passes();

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_CPU_PASS_H_
