#include "custom_ops/core/cpu/finite.h"

#include <algorithm>
#include <atomic>

namespace redsync {
namespace {

constexpr int64_t kBlock = 1 << 15;  // Elements.

// Adding the exponent's lowest bit carries into the sign bit if all exponent bits are set.
template <class Bits>
bool BlockIsFinite(const Bits* bits, int64_t n, Bits exponent) {
  constexpr Bits kSign = static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1));
  constexpr Bits kRest = static_cast<Bits>(kSign - 1);
  const Bits lowest = exponent & static_cast<Bits>(-exponent);
  Bits carries = 0;
  for (int64_t i = 0; i < n; ++i) {
    carries |= static_cast<Bits>(static_cast<Bits>(bits[i] & kRest) + lowest);
  }
  return (carries & kSign) == 0;
}

}  // namespace

template <class Bits>
bool AllFinite(const Bits* bits, int64_t n, Bits exponent, const ParallelFor& parallel_for) {
  if (n <= kBlock) return BlockIsFinite(bits, n, exponent);
  std::atomic<bool> finite{true};
  parallel_for(CeilDiv(n, kBlock), kBlock / 4, [&](int64_t first, int64_t last) {
    for (int64_t at = first * kBlock; at < std::min(n, last * kBlock); at += kBlock) {
      if (!BlockIsFinite(bits + at, std::min(kBlock, n - at), exponent)) finite = false;
    }
  });
  return finite;
}

template bool AllFinite(const uint16_t*, int64_t, uint16_t, const ParallelFor&);
template bool AllFinite(const uint32_t*, int64_t, uint32_t, const ParallelFor&);
template bool AllFinite(const uint64_t*, int64_t, uint64_t, const ParallelFor&);

}  // namespace redsync
