// Bits in words of 32: codes of a fixed and of a varying number of bits, bitmaps.
//
// Bit t is bit t % 32 of word t / 32, and the low bit of a code comes first.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_CPU_BITS_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_CPU_BITS_H_

#include <cstdint>

#include "custom_ops/core/cpu/codec_error.h"
#include "custom_ops/core/cpu/common.h"

namespace redsync {

constexpr int kMaxCodeBits = 32;
constexpr int kMaxRice = 30;                              // Low bits in codes of Golomb and Rice.
constexpr int64_t kMaxBitmapWords = int64_t{1} << 26;     // Places of bits are int32.
constexpr int64_t kMaxListedWords = kMaxBitmapWords - 1;  // So are numbers of set bits.

// The low `count` bits, in [0, kMaxCodeBits].
inline uint32_t Low(uint64_t bits, int count) {
  return static_cast<uint32_t>(bits & ((uint64_t{1} << count) - 1));
}

inline int64_t PackedWords(int64_t count, int bits) { return CeilDiv(count * bits, 32); }

// Bits in order, collected in 64 before they go to memory.
class BitWriter {
 public:
  // Goes on behind the first `start` bits, which are kept.
  explicit BitWriter(uint32_t* words, int64_t start = 0)
      : words_(words + start / 32), fill_(static_cast<int>(start % 32)) {
    if (fill_ > 0) buffer_ = Low(*words_, fill_);
  }

  // A code of `count` bits, in [0, kMaxCodeBits], and none above them.
  void Put(uint32_t code, int count) {
    buffer_ |= uint64_t{code} << fill_;
    fill_ += count;
    if (fill_ >= 32) {
      *words_++ = static_cast<uint32_t>(buffer_);
      buffer_ >>= 32;
      fill_ -= 32;
    }
  }
  // Writes the last word, with zeros at its end.
  void Finish() {
    if (fill_ > 0) *words_ = static_cast<uint32_t>(buffer_);
  }

 private:
  uint32_t* words_;
  uint64_t buffer_ = 0;
  int fill_;
};

// Codes in order, out of words that are read when they are needed.
class BitReader {
 public:
  // Begins behind the first `start` bits.
  explicit BitReader(const uint32_t* words, int64_t start = 0) : words_(words + start / 32) {
    Take(static_cast<int>(start % 32));
  }

  // The next `count` bits, in [0, kMaxCodeBits].
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

// Undoes it.
void UnpackBits(const uint32_t* words, int64_t count, int bits, uint32_t* codes);

// Writes the low lengths[i] bits, at most kMaxCodeBits, of each code; what is beyond `size` words
// is left out.
Status WriteBits(const int64_t* codes, const int32_t* lengths, int64_t count, int64_t size,
                 uint32_t* words, CodecError* error);

// A bitmap of `size` words, at most kMaxBitmapWords, in which the bits at the first `count`
// positions are set. They ascend.
Status MakeBitmap(const uint32_t* positions, int64_t slots, int64_t count, int64_t size,
                  uint32_t* words, CodecError* error);

// How many bits are set in `size` words.
int64_t CountBits(const uint32_t* words, int64_t size);

// Lists where bits are set in `size` words, at most kMaxBitmapWords: the first `slots` positions,
// ascending, and 0 after the last one.
void FindBits(const uint32_t* words, int64_t size, int64_t slots, uint32_t* positions);

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_CPU_BITS_H_
