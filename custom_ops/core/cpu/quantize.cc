#include "custom_ops/core/cpu/quantize.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

namespace redsync {
namespace {

// Elements of a piece, all of one bucket; their codes stay in the L1 cache.
constexpr int kPiece = 1024;
// Elements of a thread's task.
constexpr int64_t kShard = 16 * kPiece;

// The largest code of a power of two: the exponent below that of infinity, and a sign.
constexpr int32_t kMaxPowerCode = 2 * 254 + 1;

// Parameters for the codes of a piece.
struct Levels {
  float low;   // With two codes, the value of code 0.
  float high;  // With two codes, the value of code 1; else the scale.
  // With more codes, a code decodes to (code * 2^shift - s) * unit.
  float unit;
  int32_t s;
  int32_t shift;
};

#define REDSYNC_FOR_BITS(f) \
  f(1) f(2) f(3) f(4) f(5) f(6) f(7) f(8) f(9) f(10) f(11) f(12) f(13) f(14) f(15) f(16)

#define REDSYNC_SOURCE "custom_ops/core/cpu/quantize_inl.h"
#include "custom_ops/core/cpu/versions_inl.h"

struct Loops {
  decltype(&plain::Pack) pack;
  decltype(&plain::Unpack) unpack;
  decltype(&plain::Philox) philox;
  decltype(&plain::Encode) encode;
  decltype(&plain::AddBinary) add_binary;
  decltype(&plain::AddLevels) add_levels;
  decltype(&plain::AddPowers) add_powers;
};

#define REDSYNC_LOOPS(simd)                                        \
  {simd::Pack,      simd::Unpack,    simd::Philox,   simd::Encode, \
   simd::AddBinary, simd::AddLevels, simd::AddPowers}

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

bool IsBinary(const QuantizeFormat& format) {
  return format.quantizer == Quantizer::kSign || format.quantizer == Quantizer::kTwoLevel;
}

Levels MakeLevels(const QuantizeFormat& format, const float* scales, int64_t bucket) {
  if (format.quantizer == Quantizer::kNatural) return {};
  const float* scale = scales + bucket * format.scales_per_bucket();
  if (format.quantizer == Quantizer::kSign) return {-scale[0], scale[0], 0, 0, 0};
  if (format.quantizer == Quantizer::kTwoLevel) return {scale[0], scale[1], 0, 0, 0};
  Levels levels = {0, scale[0], scale[0] / static_cast<float>(format.levels), format.levels,
                   format.quantizer == Quantizer::kUniform ? 1 : 0};
  // A scale of 0 becomes infinite, so that a division by it gives 0.
  const bool divides = IsStochastic(format.quantizer);
  if (divides && !(scale[0] > 0)) levels.high = std::numeric_limits<float>::infinity();
  return levels;
}

decltype(Loops::add_levels) AddLoop(const QuantizeFormat& format, const Loops& loops) {
  if (IsBinary(format)) return loops.add_binary;
  return format.quantizer == Quantizer::kNatural ? loops.add_powers : loops.add_levels;
}

// Calls body(begin, count) for the pieces of [begin, end).
template <class Body>
void ForPieces(const QuantizeFormat& format, int64_t begin, int64_t end, const Body& body) {
  while (begin < end) {
    int64_t stop = std::min(end, begin + kPiece);
    if (format.bucket > 0) {
      stop = std::min(stop, (begin / format.bucket + 1) * format.bucket);
    }
    body(begin, static_cast<int>(stop - begin));
    begin = stop;
  }
}

// Returns the index of the first word of a piece.
int64_t FirstWord(int64_t element, int bits) { return element / kBucketUnit * bits; }
int Groups(int count) { return (count + 31) / 32; }

// Returns the error for the first code of a rank that is out of range, if any.
Status FindBadCode(const QuantizeFormat& format, const QuantizedTensor& coded, int64_t rank,
                   CodecError* error) {
  const int bits = format.bits();
  const auto* words =
      reinterpret_cast<const uint32_t*>(coded.messages + rank * coded.stride + coded.words_at);
  for (int64_t i = 0; i < coded.size; ++i) {
    uint32_t code = 0;
    for (int b = 0; b < bits; ++b) {
      const int64_t at = i * bits + b;
      code |= (words[at / 32] >> (at % 32) & 1) << b;
    }
    if (code > static_cast<uint32_t>(format.max_code())) {
      error->rank = rank;
      return Fail("code", i, code, format.max_code(), nullptr, error);
    }
  }
  return Status::kOk;
}

}  // namespace

int32_t MaxLevels(Quantizer quantizer) {
  return quantizer == Quantizer::kStochastic ? 32767 : quantizer == Quantizer::kUniform ? 65535 : 1;
}

bool IsStochastic(Quantizer quantizer) { return quantizer >= Quantizer::kStochastic; }

int QuantizeFormat::bits() const {
  int bits = 1;
  while (max_code() >> bits != 0) ++bits;
  return bits;
}

int32_t QuantizeFormat::max_code() const {
  if (IsBinary(*this)) return 1;
  if (quantizer == Quantizer::kNatural) return kMaxPowerCode;
  return quantizer == Quantizer::kUniform ? levels : 2 * levels;
}

int64_t QuantizeFormat::scales(int64_t size) const {
  return scales_per_bucket() * (bucket == 0 ? 1 : CeilDiv(size, bucket));
}

int64_t QuantizeFormat::words(int64_t size) const { return CeilDiv(size * bits(), 32); }

Status CheckScales(const QuantizeFormat& format, const float* scales, int64_t size,
                   bool must_be_finite, CodecError* error) {
  ScopedFlushDenormals flush;
  const bool any_sign = format.quantizer == Quantizer::kTwoLevel;
  const int64_t count = size == 0 ? 0 : format.scales(size);
  for (int64_t i = 0; i < count; ++i) {
    const bool bad = must_be_finite && !std::isfinite(scales[i]);
    if (!bad && (any_sign || !(scales[i] < 0))) continue;
    const char* rule = any_sign ? "finite" : must_be_finite ? "finite and >= 0" : ">= 0";
    return Fail("scale", i, scales[i], 0, rule, error);
  }
  return Status::kOk;
}

bool QuantizeTensor(const QuantizeFormat& format, const float* x, const float* scales, int64_t size,
                    const RandomStream& stream, int64_t tensor, const ParallelFor& parallel_for,
                    int32_t* words, float* errors) {
  const Loops& loops = BestLoops();
  const int bits = format.bits();
  const bool random_bits = IsStochastic(format.quantizer);
  const int64_t scales_count = size == 0 ? 0 : format.scales(size);
  std::atomic<bool> finite{
      std::all_of(scales, scales + scales_count, [](float c) { return std::isfinite(c); })};
  parallel_for(CeilDiv(size, kShard), kShard * (random_bits ? 6 : 2), [&](int64_t a, int64_t b) {
    ScopedFlushDenormals flush;
    alignas(64) uint32_t random[kPiece], codes[kPiece], packed[kPiece / 2];
    uint32_t largest = 0;
    ForPieces(format, a * kShard, std::min(size, b * kShard), [&](int64_t begin, int count) {
      const Levels levels = MakeLevels(format, scales, format.bucket_of(begin));
      if (random_bits) {
        loops.philox(stream.seed, stream.worker, begin / 4, static_cast<uint32_t>(tensor),
                     stream.step, (count + 3) / 4, random);
      }
      const uint32_t top = loops.encode(format.quantizer, x + begin, count, levels, random, codes,
                                        errors ? errors + begin : nullptr);
      largest = std::max(largest, top);
      std::fill(codes + count, codes + 32 * Groups(count), 0);
      loops.pack(bits, codes, Groups(count), packed);
      std::memcpy(words + FirstWord(begin, bits), packed,
                  CeilDiv(int64_t{count} * bits, 32) * sizeof(int32_t));
    });
    if (largest >= 0x7f800000u) finite = false;
  });
  return finite;
}

Status DequantizeSum(const QuantizeFormat& format, const QuantizedTensor& coded,
                     const ParallelFor& parallel_for, float* out, CodecError* error) {
  const Loops& loops = BestLoops();
  const int bits = format.bits();
  const auto add = AddLoop(format, loops);
  std::atomic<int64_t> bad_rank{coded.ranks};
  const int64_t cost = kShard * (1 + 2 * coded.ranks);
  parallel_for(CeilDiv(coded.size, kShard), cost, [&](int64_t a, int64_t b) {
    ScopedFlushDenormals flush;
    alignas(64) uint32_t codes[kPiece], packed[kPiece / 2];
    ForPieces(format, a * kShard, std::min(coded.size, b * kShard), [&](int64_t begin, int count) {
      std::fill(out + begin, out + begin + count, 0.0f);
      for (int64_t rank = 0; rank < coded.ranks; ++rank) {
        const int32_t* row = coded.messages + rank * coded.stride;
        if (row[0] == 0) continue;
        const auto* scales = reinterpret_cast<const float*>(row + coded.scales_at);
        const Levels levels = MakeLevels(format, scales, format.bucket_of(begin));
        std::memcpy(packed, row + coded.words_at + FirstWord(begin, bits),
                    CeilDiv(int64_t{count} * bits, 32) * sizeof(int32_t));
        loops.unpack(bits, packed, Groups(count), codes);
        if (add(codes, count, levels, out + begin) > static_cast<uint32_t>(format.max_code())) {
          int64_t seen = bad_rank;
          while (rank < seen && !bad_rank.compare_exchange_weak(seen, rank)) {
          }
        }
      }
    });
  });
  if (bad_rank == coded.ranks) return Status::kOk;
  return FindBadCode(format, coded, bad_rank, error);
}

}  // namespace redsync
