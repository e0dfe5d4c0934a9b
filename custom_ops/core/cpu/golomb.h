// Golomb-Rice codes of ascending positions.
//
// A message part is [count, low words.., bitmap words..]. Position i_j is coded as the gap
// d = i_j - i_{j-1} >= 1 (i_{-1} = -1): the first section has the `rice` low bits of d - 1, and
// the bitmap (d - 1) >> rice zeros and a one. See bits.h for their order.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_CPU_GOLOMB_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_CPU_GOLOMB_H_

#include <cstdint>

#include "custom_ops/core/cpu/bits.h"
#include "custom_ops/core/cpu/codec_error.h"
#include "custom_ops/core/cpu/common.h"

namespace redsync {

constexpr int64_t kMaxGolombWords = kMaxBitmapWords - 1;  // The limit for the low bits, too.

constexpr int64_t kGolombHeaderWords = 1;  // [count]

struct GolombFormat {
  int64_t size = 0;   // Elements of the tensor, at most kMaxElements: positions are in [0, size).
  int64_t slots = 0;  // Maximum number of positions, in [0, size].
  int rice = 0;       // In [0, kMaxRice].

  int64_t low_words() const { return PackedWords(slots, rice); }

  // Words that suffice for any positions: each has a one, and its gap has a zero for every 2^rice
  // skipped elements.
  int64_t bitmap_words() const { return CeilDiv(slots + ((size - slots) >> rice), 32); }

  // Words of both sections, at most kMaxGolombWords.
  int64_t words() const { return low_words() + bitmap_words(); }

  // Words of [count, code].
  int64_t part_words() const { return kGolombHeaderWords + words(); }
};

// Writes part_words() words.
Status GolombEncode(const GolombFormat& format, const uint32_t* positions, int64_t count,
                    int32_t* part, CodecError* error);

// Reads part_words() words; writes `slots` positions, 0 after the last one.
Status GolombDecode(const GolombFormat& format, const int32_t* part, uint32_t* positions,
                    int32_t* count, CodecError* error);

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_CPU_GOLOMB_H_
