#include "custom_ops/core/cpu/golomb.h"

#include <algorithm>

#include "custom_ops/core/cpu/bits.h"

namespace redsync {
namespace {

// The bits [0, end) of words. Callers check left() before they read.
class Reader {
 public:
  Reader(const uint32_t* words, int64_t end) : words_(words), end_(end) {}

  int64_t left() const { return end_ - at_; }
  int64_t at() const { return at_; }

  // Ones up to the next zero, which is passed over; -1 if there is no zero.
  int64_t Ones() {
    const int64_t start = at_;
    while (at_ < end_) {
      const int in_word = static_cast<int>(32 - at_ % 32);
      const uint32_t zeros = ~(words_[at_ / 32] >> (at_ % 32));
      const int ones = zeros == 0 ? 32 : __builtin_ctz(zeros);
      if (ones < in_word) {
        at_ += ones;
        if (at_ >= end_) return -1;
        return at_++ - start;
      }
      at_ += in_word;
    }
    return -1;
  }
  // At most 31 bits, no more than are left.
  uint32_t Take(int count) {
    if (count == 0) return 0;
    const int64_t word = at_ / 32;
    const int shift = static_cast<int>(at_ % 32);
    uint64_t bits = words_[word] >> shift;
    if (shift + count > 32) bits |= uint64_t{words_[word + 1]} << (32 - shift);
    at_ += count;
    return static_cast<uint32_t>(bits) & ((1u << count) - 1);
  }

 private:
  const uint32_t* words_;
  int64_t end_;
  int64_t at_ = 0;
};

}  // namespace

Status GolombEncode(const GolombFormat& format, const uint32_t* positions, int64_t count,
                    int32_t* part, CodecError* error) {
  if (count < 0 || count > format.slots) {
    return Fail("count", 0, count, format.slots, nullptr, error);
  }
  std::fill(part, part + format.part_words(), 0);
  BitWriter writer(reinterpret_cast<uint32_t*>(part + kGolombHeaderWords));
  int64_t last = -1;
  for (int64_t i = 0; i < count; ++i) {
    const Status status = CheckAscending(positions[i], last, format.size, i, error);
    if (status != Status::kOk) return status;
    const int64_t rest = positions[i] - last - 1;
    writer.PutOnes(rest >> format.rice);
    writer.Put(0, 1);
    writer.Put(static_cast<uint32_t>(rest & ((int64_t{1} << format.rice) - 1)), format.rice);
    last = positions[i];
  }
  part[0] = static_cast<int32_t>(count);
  part[1] = static_cast<int32_t>(writer.Finish());
  return Status::kOk;
}

Status GolombDecode(const GolombFormat& format, const int32_t* part, uint32_t* positions,
                    int32_t* count, CodecError* error) {
  const int64_t n = part[0], bits = part[1];
  if (n < 0 || n > format.slots) return Fail("count", 0, n, format.slots, nullptr, error);
  if (bits < 0 || bits > 32 * format.words()) {
    return Fail("bits", 0, bits, 32 * format.words(), nullptr, error);
  }
  Reader reader(reinterpret_cast<const uint32_t*>(part + kGolombHeaderWords), bits);
  int64_t position = -1;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t ones = reader.Ones();
    if (ones < 0 || reader.left() < format.rice) {
      return Fail("bits", i, bits, 0, "enough for all codes", error);
    }
    position += 1 + (ones << format.rice) + reader.Take(format.rice);
    if (position >= format.size) return Fail("index", i, position, format.size - 1, nullptr, error);
    positions[i] = static_cast<uint32_t>(position);
  }
  if (reader.left() != 0) return Fail("bits", n, bits, reader.at(), "used up by the codes", error);
  std::fill(positions + n, positions + format.slots, 0);
  *count = static_cast<int32_t>(n);
  return Status::kOk;
}

}  // namespace redsync
