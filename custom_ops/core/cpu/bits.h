// Bits in 32-bit words: codes of fixed and of variable length, and bitmaps.
//
// Bit t is bit t % 32 of word t / 32, and the low bit of a code comes first.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_CPU_BITS_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_CPU_BITS_H_

#include <cstdint>

#include "custom_ops/core/cpu/codec_error.h"
#include "custom_ops/core/cpu/common.h"

namespace redsync {

constexpr int kMaxCodeBits = 32;
constexpr int kMaxRice = 30;                              // Low bits of a Golomb or Rice code.
constexpr int64_t kMaxBitmapWords = int64_t{1} << 26;     // Positions of bits are int32.
constexpr int64_t kMaxListedWords = kMaxBitmapWords - 1;  // Counts of set bits are int32.

// Returns the low `count` bits, `count` in [0, kMaxCodeBits].
inline uint32_t Low(uint64_t bits, int count) {
  return static_cast<uint32_t>(bits & ((uint64_t{1} << count) - 1));
}

inline int64_t PackedWords(int64_t count, int bits) { return CeilDiv(count * bits, 32); }

// Writes codes in order, through a 64-bit buffer.
class BitWriter {
 public:
  // Appends to the first `start` bits, which are kept.
  explicit BitWriter(uint32_t* words, int64_t start = 0)
      : words_(words + start / 32), fill_(static_cast<int>(start % 32)) {
    if (fill_ > 0) buffer_ = Low(*words_, fill_);
  }

  // Writes a code of `count` bits, in [0, kMaxCodeBits]; its higher bits are 0.
  void Put(uint32_t code, int count) {
    buffer_ |= uint64_t{code} << fill_;
    fill_ += count;
    if (fill_ >= 32) {
      *words_++ = static_cast<uint32_t>(buffer_);
      buffer_ >>= 32;
      fill_ -= 32;
    }
  }
  // Writes the last word, padded with zeros.
  void Finish() {
    if (fill_ > 0) *words_ = static_cast<uint32_t>(buffer_);
  }

 private:
  uint32_t* words_;
  uint64_t buffer_ = 0;
  int fill_;
};

// Reads codes in order; loads a word when its bits are needed.
class BitReader {
 public:
  // Skips the first `start` bits.
  explicit BitReader(const uint32_t* words, int64_t start = 0) : words_(words + start / 32) {
    Take(static_cast<int>(start % 32));
  }

  // Returns the next `count` bits, `count` in [0, kMaxCodeBits].
  uint32_t Take(int count) {
    if (fill_ < count) {
      buffer_ |= uint64_t{*words_++} << fill_;
      fill_ += 32;
    }
    const uint32_t code = Low(buffer_, count);
    buffer_ >>= count;
    fill_ -= count;
    return code;
  }

 private:
  const uint32_t* words_;
  uint64_t buffer_ = 0;
  int fill_ = 0;
};

// Writes the low `bits` bits of `count` codes into PackedWords(count, bits) words.
void PackBits(const uint32_t* codes, int64_t count, int bits, uint32_t* words);

// Inverse of PackBits().
void UnpackBits(const uint32_t* words, int64_t count, int bits, uint32_t* codes);

// Writes the low lengths[i] bits, at most kMaxCodeBits, of each code; drops bits beyond `size`
// words.
Status WriteBits(const int64_t* codes, const int32_t* lengths, int64_t count, int64_t size,
                 uint32_t* words, CodecError* error);

// Writes a bitmap of `size` words, at most kMaxBitmapWords, in which the bits at the first `count`
// positions are set. These positions ascend.
Status MakeBitmap(const uint32_t* positions, int64_t slots, int64_t count, int64_t size,
                  uint32_t* words, CodecError* error);

// Returns the number of set bits in `size` words.
int64_t CountBits(const uint32_t* words, int64_t size);

// Lists the positions of set bits in `size` words, at most kMaxBitmapWords: the first `slots`
// positions, ascending, and 0 after the last one.
void FindBits(const uint32_t* words, int64_t size, int64_t slots, uint32_t* positions);

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_CPU_BITS_H_
