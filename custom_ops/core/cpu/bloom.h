// Bloom filters of positions.
//
// Let h = mix(position + (seed + 1) * 0x9E3779B97F4A7C15), where mix is the finalizer of
// SplitMix64, a the low 32 bits of h, and b the high 32 bits, made odd. Probe t of `hashes` tests
// bit ((a + t * b mod 2^32) * bits) >> 32.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_CPU_BLOOM_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_CPU_BLOOM_H_

#include <cstdint>

#include "custom_ops/core/cpu/codec_error.h"
#include "custom_ops/core/cpu/common.h"

namespace redsync {

constexpr int kMaxHashes = 64;

struct BloomFormat {
  int64_t size = 0;   // Positions are in [0, size), at most kMaxElements.
  int64_t words = 0;  // 32-bit words of the filter; at least 1, less than 2^27.
  int hashes = 1;     // Probes, in [1, kMaxHashes].
  uint32_t seed = 0;
};

// Writes the filter of `count` positions, in any order.
Status BloomBuild(const BloomFormat& format, const uint32_t* positions, int64_t slots,
                  int64_t count, int32_t* filter, CodecError* error);

int64_t BloomScratchBytes(int64_t size);

// Lists the first `slots` positions that the filter contains, ascending; 0 after the last one.
// Returns their number.
int64_t BloomQuery(const BloomFormat& format, const int32_t* filter, int64_t slots, void* scratch,
                   const ParallelFor& parallel_for, uint32_t* positions);

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_CPU_BLOOM_H_
