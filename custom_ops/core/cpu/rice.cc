#include "custom_ops/core/cpu/rice.h"

#include <algorithm>

namespace redsync {
namespace {

uint32_t ZigZag(int32_t x) {
  const uint32_t twice = static_cast<uint32_t>(x) << 1;
  return x < 0 ? ~twice : twice;
}

int32_t FromZigZag(uint32_t z) { return static_cast<int32_t>((z >> 1) ^ (0 - (z & 1))); }

}  // namespace

Status RiceEncode(const RiceFormat& format, const int32_t* numbers, int32_t* code,
                  CodecError* error) {
  auto* words = reinterpret_cast<uint32_t*>(code);
  uint32_t* bitmap = words + format.low_words();
  std::fill(bitmap, bitmap + format.bitmap_words, 0);
  const uint64_t bits = 32 * format.bitmap_words;
  const int rice = format.rice;  // A local copy is not reloaded after each store.
  BitWriter low(words);
  uint64_t place = 0;
  for (int64_t i = 0; i < format.count; ++i, ++place) {
    const uint32_t z = ZigZag(numbers[i]);
    low.Put(Low(z, rice), rice);
    place += z >> rice;
    if (place >= bits) {
      return Fail("length", i, static_cast<double>(place + 1), bits, nullptr, error);
    }
    bitmap[place / 32] |= 1u << (place % 32);
  }
  low.Finish();
  return Status::kOk;
}

Status RiceDecode(const RiceFormat& format, const int32_t* code, int32_t* numbers,
                  CodecError* error) {
  const auto* words = reinterpret_cast<const uint32_t*>(code);
  const uint32_t* bitmap = words + format.low_words();
  const int64_t ones = CountBits(bitmap, format.bitmap_words);
  if (ones == 0) {
    std::fill(numbers, numbers + format.count, 0);
    return Status::kOk;
  }
  if (ones != format.count) {
    return Fail("number of ones", 0, ones, 0, "0, or one for each number", error);
  }
  const int rice = format.rice;
  BitReader low(words);
  uint64_t next = 0;  // First zero of the next number.
  int64_t i = 0;
  for (int64_t w = 0; w < format.bitmap_words; ++w) {
    for (uint32_t left = bitmap[w]; left != 0; left &= left - 1) {
      const uint64_t place = 32 * w + __builtin_ctz(left);
      const uint64_t z = (place - next) << rice | low.Take(rice);
      if (z > UINT32_MAX) {
        const int64_t limit = UINT32_MAX >> rice;
        return Fail("number of zeros", i, static_cast<double>(place - next), limit, nullptr, error);
      }
      numbers[i++] = FromZigZag(static_cast<uint32_t>(z));
      next = place + 1;
    }
  }
  return Status::kOk;
}

}  // namespace redsync
