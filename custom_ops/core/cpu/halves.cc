#include "custom_ops/core/cpu/halves.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "custom_ops/core/cpu/levels.h"
#include "custom_ops/core/cpu/simd.h"

namespace redsync {
namespace {

constexpr int64_t kShard = 1 << 14;  // Elements of a thread's task.

inline float FloatOfBits(uint32_t bits) { return FloatOf(static_cast<int32_t>(bits)); }

#define REDSYNC_SOURCE "custom_ops/core/cpu/halves_inl.h"
#include "custom_ops/core/cpu/versions_inl.h"

struct Loops {
  bool (*encode_sum)(const float* x, const float* residual, int64_t n, uint16_t* halves,
                     float* errors);
  bool (*encode)(const float* x, int64_t n, uint16_t* halves, float* errors);
  void (*decode)(const uint16_t* halves, int64_t n, float* out);
  void (*add)(const uint16_t* halves, int64_t n, float* out);
};

#define REDSYNC_LOOPS(simd, half)                                                   \
  {simd::EncodeSum<simd::half>, simd::Encode<simd::half>, simd::Decode<simd::half>, \
   simd::Add<simd::half>}
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

// Calls body(begin, n) for shards of `count` elements, from several threads.
template <class Body>
void ForShards(int64_t count, int64_t cost, const ParallelFor& parallel_for, const Body& body) {
  parallel_for(CeilDiv(count, kShard), cost * kShard, [&](int64_t first, int64_t last) {
    const ScopedFlushDenormals flush;
    for (int64_t s = first; s < last; ++s) {
      const int64_t begin = s * kShard;
      body(begin, std::min(kShard, count - begin));
    }
  });
}

// Calls body(tensor, offset, at, n) for the parts of tensors in elements [begin, begin + n) of the
// vector. The n elements of the tensor from `offset` on are those of the vector from begin + at on.
// Returns the number of elements that belong to a tensor.
template <class Body>
int64_t ForParts(const std::vector<HalfTensor>& tensors, int64_t begin, int64_t n,
                 const Body& body) {
  int64_t start = 0, at = 0;
  for (const HalfTensor& tensor : tensors) {
    if (at == n) break;
    const int64_t offset = begin + at - start;
    start += tensor.size;
    if (offset >= tensor.size) continue;
    const int64_t part = std::min(tensor.size - offset, n - at);
    body(tensor, offset, at, part);
    at += part;
  }
  return at;
}

uint16_t* HalvesOf(int32_t* message) { return reinterpret_cast<uint16_t*>(message + 1); }

const uint16_t* HalvesOf(const int32_t* message) {
  return reinterpret_cast<const uint16_t*>(message + 1);
}

}  // namespace

void EncodeHalves(Half half, const std::vector<HalfTensor>& tensors, int64_t blocks, int64_t size,
                  const ParallelFor& parallel_for, int32_t* messages) {
  const Loops& loops = BestLoops(half);
  const int64_t words = HalfWords(size);
  std::atomic<bool> finite{true};
  for (int64_t block = 0; block < blocks; ++block) {
    int32_t* message = messages + block * words;
    message[0] = 1;
    ForShards(size, 2, parallel_for, [&](int64_t begin, int64_t n) {
      uint16_t* halves = HalvesOf(message) + begin;
      const auto encode = [&](const HalfTensor& t, int64_t offset, int64_t at, int64_t part) {
        const float* x = t.x + offset;
        float* errors = t.errors + offset;
        const bool ok = t.residual == nullptr
                            ? loops.encode(x, part, halves + at, errors)
                            : loops.encode_sum(x, t.residual + offset, part, halves + at, errors);
        if (!ok) finite = false;
      };
      const int64_t encoded = ForParts(tensors, block * size + begin, n, encode);
      std::fill(halves + encoded, halves + n, 0);
    });
  }
  if (!finite) std::fill(messages, messages + blocks * words, 0);
}

void ReduceHalves(Half half, const int32_t* messages, int64_t count, int64_t size, int64_t block,
                  const std::vector<HalfTensor>& tensors, const ParallelFor& parallel_for,
                  int32_t* message) {
  const Loops& loops = BestLoops(half);
  std::atomic<bool> finite{true};
  message[0] = 1;
  ForShards(size, count + 2, parallel_for, [&](int64_t begin, int64_t n) {
    float sum[kShard];
    for (int64_t m = 0; m < count; ++m) {
      const uint16_t* halves = HalvesOf(messages + m * HalfWords(size)) + begin;
      (m == 0 ? loops.decode : loops.add)(halves, n, sum);
    }
    uint16_t* halves = HalvesOf(message) + begin;
    const auto encode = [&](const HalfTensor& t, int64_t offset, int64_t at, int64_t part) {
      float* errors = t.errors + offset;
      if (!loops.encode_sum(sum + at, errors, part, halves + at, errors)) finite = false;
    };
    const int64_t encoded = ForParts(tensors, block * size + begin, n, encode);
    std::fill(halves + encoded, halves + n, 0);
  });
  if (!finite) std::fill(message, message + HalfWords(size), 0);
}

void DecodeHalves(Half half, const int32_t* messages, int64_t blocks, int64_t size,
                  const std::vector<HalfTensor>& tensors, const ParallelFor& parallel_for) {
  const Loops& loops = BestLoops(half);
  for (int64_t block = 0; block < blocks; ++block) {
    const uint16_t* halves = HalvesOf(messages + block * HalfWords(size));
    ForShards(size, 1, parallel_for, [&](int64_t begin, int64_t n) {
      const auto decode = [&](const HalfTensor& t, int64_t offset, int64_t at, int64_t part) {
        loops.decode(halves + begin + at, part, t.errors + offset);
      };
      ForParts(tensors, block * size + begin, n, decode);
    });
  }
}

}  // namespace redsync
