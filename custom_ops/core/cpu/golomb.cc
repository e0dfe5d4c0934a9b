#include "custom_ops/core/cpu/golomb.h"

#include <algorithm>
#include <cstring>

#include "custom_ops/core/cpu/bits.h"

namespace redsync {
namespace {

constexpr int kWindow = 57;  // Bits that are left of 64 from any bit of a byte on.
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are read as bytes");

// The bits [0, end) of words. Callers check left() before they read.
class Reader {
 public:
  Reader(const uint32_t* words, int64_t end) : words_(words), end_(end) {}

  int64_t left() const { return end_ - at_; }
  int64_t at() const { return at_; }
  void Skip(int64_t bits) { at_ += bits; }

  // The next kWindow bits, of at least 64 that are left, and some more or zeros.
  uint64_t Window() const {
    uint64_t bits;
    std::memcpy(&bits, reinterpret_cast<const char*>(words_) + at_ / 8, sizeof(bits));
    return bits >> at_ % 8;
  }

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
    const int64_t rest = positions[i] - last - 1, ones = rest >> format.rice;
    const uint32_t low = Low(static_cast<uint64_t>(rest), format.rice);
    if (ones + 1 + format.rice <= kMaxCodeBits) {
      const uint64_t code = uint64_t{low} << (ones + 1) | ((uint64_t{1} << ones) - 1);
      writer.Put(static_cast<uint32_t>(code), static_cast<int>(ones) + 1 + format.rice);
    } else {
      writer.PutOnes(ones);
      writer.Put(0, 1);
      writer.Put(low, format.rice);
    }
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
  int64_t position = -1, i = 0;
  while (i < n) {
    const int64_t first = i;
    if (reader.left() >= 64) {  // The codes that are whole in a window.
      uint64_t window = reader.Window();
      int room = kWindow;
      while (i < n) {
        const int ones = __builtin_ctzll(~window | uint64_t{1} << 63);  // All ones are too many.
        const int length = ones + 1 + format.rice;
        if (length > room) break;
        position += 1 + (int64_t{ones} << format.rice) + Low(window >> (ones + 1), format.rice);
        if (position >= format.size) {
          return Fail("index", i, position, format.size - 1, nullptr, error);
        }
        positions[i++] = static_cast<uint32_t>(position);
        window >>= length;
        room -= length;
      }
      reader.Skip(kWindow - room);
    }
    if (i > first) continue;
    const int64_t ones = reader.Ones();
    if (ones < 0 || reader.left() < format.rice) {
      return Fail("bits", i, bits, 0, "enough for all codes", error);
    }
    position += 1 + (ones << format.rice) + reader.Take(format.rice);
    if (position >= format.size) return Fail("index", i, position, format.size - 1, nullptr, error);
    positions[i++] = static_cast<uint32_t>(position);
  }
  if (reader.left() != 0) return Fail("bits", n, bits, reader.at(), "used up by the codes", error);
  std::fill(positions + n, positions + format.slots, 0);
  *count = static_cast<int32_t>(n);
  return Status::kOk;
}

}  // namespace redsync
