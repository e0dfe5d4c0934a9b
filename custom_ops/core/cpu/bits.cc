#include "custom_ops/core/cpu/bits.h"

#include <algorithm>

namespace redsync {

void PackBits(const uint32_t* codes, int64_t count, int bits, uint32_t* words) {
  BitWriter writer(words);
  for (int64_t i = 0; i < count; ++i) writer.Put(Low(codes[i], bits), bits);
  writer.Finish();
}

void UnpackBits(const uint32_t* words, int64_t count, int bits, uint32_t* codes) {
  BitReader reader(words);
  for (int64_t i = 0; i < count; ++i) codes[i] = reader.Take(bits);
}

Status WriteBits(const int64_t* codes, const int32_t* lengths, int64_t count, int64_t size,
                 uint32_t* words, CodecError* error) {
  std::fill(words, words + size, 0);
  BitWriter writer(words);
  int64_t left = 32 * size;
  for (int64_t i = 0; i < count; ++i) {
    if (lengths[i] < 0 || lengths[i] > kMaxCodeBits) {
      return Fail("length", i, lengths[i], kMaxCodeBits, nullptr, error);
    }
    const int fits = static_cast<int>(std::min<int64_t>(lengths[i], left));
    writer.Put(Low(codes[i], fits), fits);
    left -= fits;
  }
  writer.Finish();
  return Status::kOk;
}

Status MakeBitmap(const uint32_t* positions, int64_t slots, int64_t count, int64_t size,
                  uint32_t* words, CodecError* error) {
  if (count < 0 || count > slots) return Fail("count", 0, count, slots, nullptr, error);
  std::fill(words, words + size, 0);
  int64_t last = -1;
  for (int64_t i = 0; i < count; ++i) {
    const Status status = CheckAscending(positions[i], last, 32 * size, i, error);
    if (status != Status::kOk) return status;
    last = positions[i];
    words[last / 32] |= 1u << (last % 32);
  }
  return Status::kOk;
}

int64_t CountBits(const uint32_t* words, int64_t size) {
  int64_t count = 0;
  for (int64_t w = 0; w < size; ++w) count += __builtin_popcount(words[w]);
  return count;
}

void FindBits(const uint32_t* words, int64_t size, int64_t slots, uint32_t* positions) {
  int64_t listed = 0;
  for (int64_t w = 0; w < size && listed < slots; ++w) {
    for (uint32_t left = words[w]; left != 0 && listed < slots; left &= left - 1) {
      positions[listed++] = static_cast<uint32_t>(32 * w + __builtin_ctz(left));
    }
  }
  std::fill(positions + listed, positions + slots, 0);
}

}  // namespace redsync
