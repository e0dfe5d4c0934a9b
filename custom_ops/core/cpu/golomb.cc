#include "custom_ops/core/cpu/golomb.h"

#include <algorithm>
#include <cstring>

namespace redsync {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "two words are read as one");

// Returns words[0] and words[1], or 0 for the second one if only one is left.
inline uint64_t TwoWords(const uint32_t* words, int64_t left) {
  if (left < 2) return words[0];
  uint64_t both;
  std::memcpy(&both, words, sizeof(both));
  return both;
}

// Returns the error for the first position that is beyond the tensor.
Status FailAt(const GolombFormat& format, const uint32_t* low, const uint32_t* bitmap,
              CodecError* error) {
  BitReader lows(low);
  int64_t position = -1, place = 0;
  for (int64_t i = 0;; ++i, ++place) {
    position += 1 + lows.Take(format.rice);
    for (; (bitmap[place / 32] >> (place % 32) & 1) == 0; ++place) {
      position += int64_t{1} << format.rice;
    }
    if (position >= format.size) return Fail("index", i, position, format.size - 1, nullptr, error);
  }
}

}  // namespace

Status GolombEncode(const GolombFormat& format, const uint32_t* positions, int64_t count,
                    int32_t* part, CodecError* error) {
  if (count < 0 || count > format.slots) {
    return Fail("count", 0, count, format.slots, nullptr, error);
  }
  std::fill(part, part + format.part_words(), 0);
  part[0] = static_cast<int32_t>(count);
  auto* words = reinterpret_cast<uint32_t*>(part + kGolombHeaderWords);
  uint32_t* bitmap = words + format.low_words();
  BitWriter low(words);
  const int rice = format.rice;  // A local copy is not reloaded after each store.
  int64_t last = -1, place = 0, word = 0;
  uint32_t ones = 0;  // Ones of the current word of the bitmap.
  for (int64_t i = 0; i < count; ++i, ++place) {
    const Status status = CheckAscending(positions[i], last, format.size, i, error);
    if (status != Status::kOk) return status;
    const auto rest = static_cast<uint32_t>(positions[i] - last - 1);
    low.Put(Low(rest, rice), rice);
    place += rest >> rice;
    if (place / 32 != word) {
      bitmap[word] = ones;
      word = place / 32;
      ones = 0;
    }
    ones |= 1u << (place % 32);
    last = positions[i];
  }
  if (count > 0) bitmap[word] = ones;
  low.Finish();
  return Status::kOk;
}

Status GolombDecode(const GolombFormat& format, const int32_t* part, uint32_t* positions,
                    int32_t* count, CodecError* error) {
  const int64_t n = part[0], bitmap_words = format.bitmap_words();
  if (n < 0 || n > format.slots) return Fail("count", 0, n, format.slots, nullptr, error);
  const auto* low = reinterpret_cast<const uint32_t*>(part + kGolombHeaderWords);
  const uint32_t* bitmap = low + format.low_words();
  const int64_t ones = CountBits(bitmap, bitmap_words);
  if (ones != n) return Fail("number of ones", 0, ones, 0, "as many as positions", error);
  const int rice = format.rice;
  const int64_t words = format.words();
  int64_t lows = 0, i = 0, last = -1;
  for (int64_t w = 0; w < bitmap_words; w += 2) {
    uint64_t left = TwoWords(bitmap + w, bitmap_words - w);
    for (; left != 0; left &= left - 1, ++i) {
      const int64_t at = i * rice, place = 32 * w + __builtin_ctzll(left);
      lows += Low(TwoWords(low + at / 32, words - at / 32) >> (at % 32), rice);
      last = lows + ((place - i) << rice) + i;
      positions[i] = static_cast<uint32_t>(last);
    }
  }
  if (last >= format.size) return FailAt(format, low, bitmap, error);
  std::fill(positions + n, positions + format.slots, 0);
  *count = static_cast<int32_t>(n);
  return Status::kOk;
}

}  // namespace redsync
