#include "custom_ops/core/cpu/golomb.h"

#include <algorithm>

namespace redsync {
namespace {

Status Fail(const char* field, int64_t slot, double value, int64_t limit, const char* rule,
            CodecError* error) {
  error->field = field;
  error->slot = slot;
  error->value = value;
  error->limit = limit;
  error->rule = rule;
  return Status::kInvalidMessage;
}

// Bits in order, lowest first, collected in 64.
class Writer {
 public:
  explicit Writer(uint32_t* words) : words_(words) {}

  // At most 32 bits at a time.
  void Put(uint32_t bits, int count) {
    buffer_ |= uint64_t{bits} << fill_;
    fill_ += count;
    if (fill_ >= 32) {
      *words_++ = static_cast<uint32_t>(buffer_);
      buffer_ >>= 32;
      fill_ -= 32;
      written_ += 32;
    }
  }
  void PutOnes(int64_t count) {
    for (; count >= 32; count -= 32) Put(0xffffffffu, 32);
    Put((1u << count) - 1, static_cast<int>(count));
  }
  int64_t Finish() {
    if (fill_ > 0) *words_ = static_cast<uint32_t>(buffer_);
    return written_ + fill_;
  }

 private:
  uint32_t* words_;
  uint64_t buffer_ = 0;
  int fill_ = 0;
  int64_t written_ = 0;
};

// The bits [0, end) of words; whoever reads must look at left() before.
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
  int64_t sent;  // All of them: words() is enough.
  return GolombEncodeFitting(format, positions, count, format.words(), part, &sent, error);
}

Status GolombEncodeFitting(const GolombFormat& format, const uint32_t* positions, int64_t count,
                           int64_t words, int32_t* part, int64_t* sent, CodecError* error) {
  if (count < 0 || count > format.slots) {
    return Fail("count", 0, count, format.slots, nullptr, error);
  }
  std::fill(part, part + 2 + words, 0);
  int64_t left = 32 * words;
  *sent = count;
  Writer writer(reinterpret_cast<uint32_t*>(part + 2));
  int64_t last = -1;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t position = positions[i];
    if (position >= format.size) {
      const int64_t shown = Shown(positions[i], format.size);
      return Fail("index", i, static_cast<double>(shown), format.size - 1, nullptr, error);
    }
    if (position <= last) return Fail("index", i, position, 0, "ascending", error);
    const int64_t rest = position - last - 1;
    left -= (rest >> format.rice) + 1 + format.rice;
    if (left < 0) {
      *sent = i;
      break;
    }
    writer.PutOnes(rest >> format.rice);
    writer.Put(0, 1);
    writer.Put(static_cast<uint32_t>(rest & ((int64_t{1} << format.rice) - 1)), format.rice);
    last = position;
  }
  part[0] = static_cast<int32_t>(*sent);
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
  Reader reader(reinterpret_cast<const uint32_t*>(part + 2), bits);
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
