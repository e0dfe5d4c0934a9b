#include "custom_ops/core/cpu/block_quantize.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "custom_ops/core/cpu/simd.h"

namespace redsync {
namespace {

constexpr int kPiece = 512;                 // Elements whose codes stay in the L1 cache.
constexpr int64_t kShard = 1 << 14;         // Approximate number of elements of a thread's task.
constexpr int32_t kTooLarge = 0x7e800000;   // The bits of 2^126.
constexpr float kSmallest = 0x1p-100f;      // Blocks below it are zeros: no unit is denormal.
constexpr float kRound = 0x1.8p23f;         // x + kRound rounds x to an integer, in its low bits.
constexpr int32_t kRoundBits = 0x4b400000;  // The bits of kRound.
// Number of scales to try with 2 bits, as fractions of the largest magnitude.
constexpr int kScales = 4;
constexpr float kShares[kScales] = {1.0f, 0.8f, 0.6f, 0.45f};

inline int32_t MagnitudeBits(float x) { return BitsOf(x) & 0x7fffffff; }

// The unit of a block's values, and its inverse; both 0 for a block of zeros.
struct Step {
  float unit, inverse;
  int32_t limit;
};

#define REDSYNC_SOURCE "custom_ops/core/cpu/block_quantize_inl.h"
#include "custom_ops/core/cpu/versions_inl.h"

struct Loops {
  decltype(&plain::Largest) largest;
  decltype(&plain::Saved) saved;
  decltype(&plain::Encode) encode;
  decltype(&plain::Pack) pack;
  decltype(&plain::Unpack) unpack;
  decltype(&plain::Decode) decode;
  decltype(&plain::Add) add;
};

#define REDSYNC_LOOPS(simd) \
  {simd::Largest, simd::Saved, simd::Encode, simd::Pack, simd::Unpack, simd::Decode, simd::Add}

const Loops& BestLoops() {
  static const Loops loops[] = {
      REDSYNC_LOOPS(plain),
#ifdef REDSYNC_X86_VERSIONS
      REDSYNC_LOOPS(avx2),
      REDSYNC_LOOPS(avx512),
#endif
  };
  return loops[static_cast<int>(WidestSimd())];
}

// A positive scale rounded up to bfloat16; 0 if it is too small.
float RoundedUp(float scale) {
  const float up =
      FloatOf(static_cast<int32_t>((static_cast<uint32_t>(BitsOf(scale)) + 0xffffu) & 0xffff0000u));
  return up < kSmallest ? 0.0f : up;
}

Step StepOf(const BlockFormat& format, float scale) {
  const float unit = scale / static_cast<float>(format.limit());
  return {unit, unit > 0 ? 1.0f / unit : 0.0f, format.limit()};
}

// The scale of a block, from the largest magnitude in it.
float ScaleOf(const BlockFormat& format, const Loops& loops, const float* x, int64_t n,
              float largest) {
  if (format.bits > 2) return RoundedUp(largest);
  float scales[kScales], saved[kScales];
  for (int s = 0; s < kScales; ++s) scales[s] = RoundedUp(kShares[s] * largest);
  loops.saved(x, n, scales, saved);
  return scales[std::max_element(saved, saved + kScales) - saved];  // The first of equal maxima.
}

// Calls body(row, first, last) for all pairs of blocks of all rows, from several threads.
template <class Body>
void ForPairs(const BlockFormat& format, int64_t rows, int64_t size, int64_t cost,
              const ParallelFor& parallel_for, const Body& body) {
  const int64_t pairs = format.pairs(size);
  const int64_t together = std::max<int64_t>(1, kShard / (2 * format.block));
  const int64_t shards = CeilDiv(pairs, together);
  parallel_for(rows * shards, cost * together * 2 * format.block, [&](int64_t a, int64_t b) {
    ScopedFlushDenormals flush;
    for (int64_t s = a; s < b; ++s) {
      const int64_t begin = s % shards * together;
      body(s / shards, begin, std::min(pairs, begin + together));
    }
  });
}

// Calls body(begin, count) for the pieces of [begin, end).
template <class Body>
void ForPieces(int64_t begin, int64_t end, const Body& body) {
  for (; begin < end; begin += kPiece) {
    body(begin, static_cast<int>(std::min<int64_t>(kPiece, end - begin)));
  }
}

}  // namespace

void BlockQuantize(const BlockFormat& format, const float* x, int64_t rows, int64_t size,
                   const ParallelFor& parallel_for, int32_t* messages, float* errors) {
  const Loops& loops = BestLoops();
  const int bits = static_cast<int>(format.bits);
  const int64_t stride = format.words(size), first_code = 1 + format.pairs(size);
  std::atomic<bool> usable{true};
  const auto quantize = [&](int64_t row, int64_t first, int64_t last) {
    alignas(64) int8_t codes[kPiece];
    int32_t* message = messages + row * stride;
    auto* packed = reinterpret_cast<uint8_t*>(message + first_code);
    const float* values = x + row * size;
    for (int64_t pair = first; pair < last; ++pair) {
      uint32_t word = 0;
      for (int64_t side = 0; side < 2; ++side) {
        const int64_t begin = (2 * pair + side) * format.block;
        const int64_t end = std::min(size, begin + format.block);
        if (begin >= end) continue;
        int32_t largest = 0;
        ForPieces(begin, end, [&](int64_t at, int n) {
          largest = std::max(largest, loops.largest(values + at, n));
        });
        if (largest >= kTooLarge) {
          usable = false;
          return;
        }
        const float scale = ScaleOf(format, loops, values + begin, end - begin, FloatOf(largest));
        word |= static_cast<uint32_t>(BitsOf(scale)) >> 16 << 16 * side;
        const Step step = StepOf(format, scale);
        ForPieces(begin, end, [&](int64_t at, int n) {
          loops.encode(bits, values + at, n, step, codes,
                       errors ? errors + row * size + at : nullptr);
          loops.pack(bits, codes, n, packed + at * bits / 8);
        });
      }
      message[1 + pair] = static_cast<int32_t>(word);
    }
  };
  ForPairs(format, rows, size, format.bits == 2 ? 4 : 2, parallel_for, quantize);
  for (int64_t row = 0; row < rows; ++row) messages[row * stride] = 1;
  if (!usable) std::fill(messages, messages + rows * stride, 0);
}

void BlockDequantize(const BlockFormat& format, const int32_t* messages, int64_t rows, int64_t size,
                     bool sum, const ParallelFor& parallel_for, float* out) {
  const Loops& loops = BestLoops();
  const int bits = static_cast<int>(format.bits);
  const int64_t stride = format.words(size), first_code = 1 + format.pairs(size);
  const auto decode = [&](int64_t row, int64_t first, int64_t last) {
    alignas(64) int8_t codes[kPiece];
    const int64_t from = sum ? 0 : row, to = sum ? rows : row + 1;
    float* target = sum ? out : out + row * size;
    for (int64_t block = 2 * first; block < 2 * last; ++block) {
      ForPieces(block * format.block, std::min(size, (block + 1) * format.block),
                [&](int64_t at, int n) {
                  if (sum) std::fill(target + at, target + at + n, 0.0f);
                  for (int64_t r = from; r < to; ++r) {
                    const int32_t* message = messages + r * stride;
                    const auto scales = static_cast<uint32_t>(message[1 + block / 2]);
                    const auto high = block % 2 ? scales & 0xffff0000u : scales << 16;
                    const Step step = StepOf(format, FloatOf(static_cast<int32_t>(high)));
                    const auto* packed = reinterpret_cast<const uint8_t*>(message + first_code);
                    loops.unpack(bits, packed + at * bits / 8, n, codes);
                    (sum ? loops.add : loops.decode)(codes, n, step.unit, target + at);
                  }
                });
    }
  };
  ForPairs(format, sum ? 1 : rows, size, sum ? 1 + 2 * rows : 2, parallel_for, decode);
}

}  // namespace redsync
