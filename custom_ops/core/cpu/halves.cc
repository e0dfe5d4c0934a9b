#include "custom_ops/core/cpu/halves.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "custom_ops/core/cpu/levels.h"
#include "custom_ops/core/cpu/simd.h"

// One source, compiled for several instruction sets; which one runs is decided at run time.
namespace redsync {
namespace {

constexpr int64_t kShard = 1 << 14;  // Elements that a thread takes at a time.

inline float FloatOfBits(uint32_t bits) { return FloatOf(static_cast<int32_t>(bits)); }

namespace plain {
#include "custom_ops/core/cpu/halves_inl.h"
}  // namespace plain

#ifdef REDSYNC_X86_VERSIONS
#pragma GCC push_options
#pragma GCC target("avx2")
namespace avx2 {
#include "custom_ops/core/cpu/halves_inl.h"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512dq,avx512bw,prefer-vector-width=512")
namespace avx512 {
#include "custom_ops/core/cpu/halves_inl.h"
}  // namespace avx512
#pragma GCC pop_options
#endif

struct Loops {
  bool (*encode)(const float* x, int64_t n, uint16_t* halves, float* errors);
  void (*decode)(const uint16_t* halves, int64_t n, float* out);
  void (*add)(const uint16_t* halves, int64_t n, float* out);
};

#define REDSYNC_LOOPS(simd, half) \
  {simd::Encode<simd::half>, simd::Decode<simd::half>, simd::Add<simd::half>}
#define REDSYNC_BOTH(simd) {REDSYNC_LOOPS(simd, Float16), REDSYNC_LOOPS(simd, Bfloat16)}

const Loops& BestLoops(Half half) {
  static const Loops loops[][2] = {
      REDSYNC_BOTH(plain),
#ifdef REDSYNC_X86_VERSIONS
      REDSYNC_BOTH(avx2),
      REDSYNC_BOTH(avx512),
#endif
  };
  return loops[static_cast<int>(WidestSimd())][half == Half::kFloat16 ? 0 : 1];
}

// Calls body(row, begin, count) for shards of all rows, from several threads.
template <class Body>
void ForShards(int64_t rows, int64_t size, int64_t cost, const ParallelFor& parallel_for,
               const Body& body) {
  const int64_t shards = CeilDiv(size, kShard);
  parallel_for(rows * shards, cost * kShard, [&](int64_t first, int64_t last) {
    const ScopedFlushDenormals flush;
    for (int64_t s = first; s < last; ++s) {
      const int64_t begin = s % shards * kShard;
      body(s / shards, begin, std::min(kShard, size - begin));
    }
  });
}

}  // namespace

void EncodeHalves(Half half, const float* x, int64_t rows, int64_t size,
                  const ParallelFor& parallel_for, int32_t* messages, float* errors) {
  const Loops& loops = BestLoops(half);
  const int64_t words = HalfWords(size);
  std::atomic<bool> finite{true};
  ForShards(rows, size, 2, parallel_for, [&](int64_t row, int64_t begin, int64_t n) {
    auto* halves = reinterpret_cast<uint16_t*>(messages + row * words + 1) + begin;
    const int64_t at = row * size + begin;
    if (!loops.encode(x + at, n, halves, errors + at)) finite = false;
  });
  for (int64_t row = 0; row < rows; ++row) messages[row * words] = 1;
  if (!finite) std::fill(messages, messages + rows * words, 0);
}

void DecodeHalves(Half half, const int32_t* messages, int64_t rows, int64_t size, bool sum,
                  const ParallelFor& parallel_for, float* out) {
  const Loops& loops = BestLoops(half);
  const auto halves_of = [&](int64_t row, int64_t begin) {
    return reinterpret_cast<const uint16_t*>(messages + row * HalfWords(size) + 1) + begin;
  };
  ForShards(sum ? 1 : rows, size, sum ? rows : 1, parallel_for,
            [&](int64_t row, int64_t begin, int64_t n) {
              float* target = out + row * size + begin;
              loops.decode(halves_of(row, begin), n, target);
              for (int64_t r = 1; sum && r < rows; ++r) loops.add(halves_of(r, begin), n, target);
            });
}

}  // namespace redsync
