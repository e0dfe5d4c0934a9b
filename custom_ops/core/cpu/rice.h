// Rice codes of signed integers, in two parts: low bits, and a bitmap.
//
// The zigzag number of x is z = 2 x if x >= 0, else -2 x - 1. The first part has the low `rice`
// bits of each z. The second one has z >> rice zeros and a one for each. See bits.h for their
// order.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_CPU_RICE_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_CPU_RICE_H_

#include <cstdint>

#include "custom_ops/core/cpu/bits.h"
#include "custom_ops/core/cpu/codec_error.h"
#include "custom_ops/core/cpu/common.h"

namespace redsync {

struct RiceFormat {
  int64_t count = 0;         // Number of integers.
  int64_t bitmap_words = 0;  // At most kMaxBitmapWords.
  int rice = 0;              // In [0, kMaxRice].

  int64_t low_words() const { return PackedWords(count, rice); }
  int64_t words() const { return low_words() + bitmap_words; }
};

// Writes words() words. Fails if the numbers do not fit.
Status RiceEncode(const RiceFormat& format, const int32_t* numbers, int32_t* code,
                  CodecError* error);

// Reads words() words. A bitmap without ones decodes to zeros.
Status RiceDecode(const RiceFormat& format, const int32_t* code, int32_t* numbers,
                  CodecError* error);

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_CPU_RICE_H_
