// Check whether all elements of a tensor are finite.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_CPU_FINITE_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_CPU_FINITE_H_

#include <cstdint>

#include "custom_ops/core/cpu/common.h"

namespace redsync {

// Returns whether no element of bits[0 .. n) has all ones in its exponent, as infinities and NaNs
// have. Bits is uint16_t, uint32_t or uint64_t.
//
// Args:
//   exponent: The exponent's bits: 0x7c00 for float16, 0x7f80 for bfloat16.
template <class Bits>
bool AllFinite(const Bits* bits, int64_t n, Bits exponent, const ParallelFor& parallel_for);

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_CPU_FINITE_H_
