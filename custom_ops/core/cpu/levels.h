// Codes of a few bits for the values of selected elements: a sign, and one of a few magnitudes.
//
// The magnitudes are conditional means: a set of values is divided at its mean, each half again at
// its own mean, and so on. The levels are the means of the last sets. Means are computed from
// magnitudes in units of 2^-31 of the power of two above the largest one, rounded down. These are
// integers, so their sums do not depend on the order.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_CPU_LEVELS_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_CPU_LEVELS_H_

#include <cstdint>

#include "custom_ops/core/cpu/common.h"

namespace redsync {

constexpr int kMaxLevelBits = 4;  // Bits of a code with levels: a sign and up to 3 bits.
constexpr int kHalfBits = 16;     // Bits of a bfloat16, which replaces a code with levels.

// Returns the number of magnitudes of codes with `bits` bits.
inline int64_t LevelCount(int bits) { return int64_t{1} << (bits - 1); }

// Writes LevelCount(bits) levels, 0 for a level without values, and for each value the code
// 2 * level + [value < 0]. Values are the bits of finite floats.
void CodeByMeans(const int32_t* values, int64_t count, int bits, float* levels, uint32_t* codes);

// Returns the bfloat16 nearest to a finite float, ties to even.
inline uint16_t HalfOf(int32_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits);
  return static_cast<uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
}

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_CPU_LEVELS_H_
