// Golomb-Rice codes of ascending positions.
//
// A message part is [count, bits, words..]. Position i_j is coded as the gap d = i_j - i_{j-1} >= 1
// (i_{-1} = -1): (d - 1) >> rice as so many ones and a zero, then the `rice` low bits of d - 1,
// lowest first. Bit t of the stream is bit t % 32 of word t / 32.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_CPU_GOLOMB_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_CPU_GOLOMB_H_

#include <cstdint>

#include "custom_ops/core/cpu/codec_error.h"
#include "custom_ops/core/cpu/common.h"

namespace redsync {

constexpr int64_t kMaxGolombWords = INT32_MAX / 32;  // Lengths in bits travel as int32.

constexpr int64_t kGolombHeaderWords = 2;  // [count, bits]

struct GolombFormat {
  int64_t size = 0;   // Elements of the tensor, at most kMaxElements: positions are in [0, size).
  int64_t slots = 0;  // Most positions that there can be, in [0, size].
  int rice = 0;       // In [0, 30].

  // Words of [count, bits, code].
  int64_t part_words() const { return kGolombHeaderWords + words(); }

  // Words that suffice for every choice of positions: a position costs rice + 1 bits, and its gap
  // one more for every 2^rice that it leaps over. At most kMaxGolombWords.
  int64_t words() const { return CeilDiv(slots * (rice + 1) + ((size - slots) >> rice), 32); }
};

// Writes part_words() words.
Status GolombEncode(const GolombFormat& format, const uint32_t* positions, int64_t count,
                    int32_t* part, CodecError* error);

// Reads part_words() words; writes `slots` positions, 0 after the last one.
Status GolombDecode(const GolombFormat& format, const int32_t* part, uint32_t* positions,
                    int32_t* count, CodecError* error);

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_CPU_GOLOMB_H_
