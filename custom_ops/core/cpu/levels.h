// Codes of a few bits for the values of selected elements: a sign, and one of a few magnitudes.
//
// The magnitudes are conditional means: a set of values is divided at its mean, each half again at
// its own mean, and so on; the means of the last sets are the levels. Means are those of magnitudes
// in units of 2^-31 of the power of two above the largest one, rounded down: sums of integers, the
// same in any order.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_CPU_LEVELS_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_CPU_LEVELS_H_

#include <cstdint>

#include "custom_ops/core/cpu/common.h"

namespace redsync {

constexpr int kMaxLevelBits = 4;  // Of a code with levels: a sign and 3 bits of magnitude.
constexpr int kHalfBits = 16;     // A bfloat16 in place of a code with levels.

// Magnitudes that codes of `bits` bits stand for.
inline int64_t LevelCount(int bits) { return int64_t{1} << (bits - 1); }

// Writes LevelCount(bits) levels, 0 for one that no value has, and for each value the code
// 2 * level + [value < 0]. Values are finite floats, as their bits.
void CodeByMeans(const int32_t* values, int64_t count, int bits, float* levels, uint32_t* codes);

// The bfloat16 nearest to a finite float, ties to even.
inline uint16_t HalfOf(int32_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits);
  return static_cast<uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
}

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_CPU_LEVELS_H_
