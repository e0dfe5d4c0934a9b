// Golomb codes: their maximal length, and the reader of a chunk of them.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_GPU_GOLOMB_STREAM_CUH_
#define TF_REDSYNC_CUSTOM_OPS_CORE_GPU_GOLOMB_STREAM_CUH_

#include "custom_ops/core/gpu/bits.cuh"
#include "custom_ops/core/gpu/compression_api.h"
#include "custom_ops/core/gpu/platform.cuh"

namespace redsync {
namespace gpu {

// Words that suffice for every choice of positions; -1 if an argument is out of its range.
inline int64_t GolombWords(const RedsyncGpuPositions& p) {
  if (p.size < 0 || p.size > UINT32_MAX || p.slots < 0 || p.slots > p.size || p.slots > INT32_MAX ||
      p.rice < 0 || p.rice > 30) {
    return -1;
  }
  const int64_t words = CeilDiv(p.slots * (p.rice + 1) + ((p.size - p.slots) >> p.rice), 32);
  return words > INT32_MAX / 32 ? -1 : words;  // Lengths in bits travel as int32.
}

constexpr uint32_t kChunkBits = 1024;  // Bits that are read together.

// The codes of one tensor, as bits in words.
struct GolombStream {
  const uint32_t* words;
  uint32_t bits;

  __device__ uint32_t chunks() const { return (bits + kChunkBits - 1) / kChunkBits; }
};

// The effect of reading a chunk from one state.
struct Step {
  int64_t advance;  // Of the position.
  uint32_t codes;   // That end in the chunk.
  uint16_t state;   // Low bits to go after it.
  uint16_t end;     // Bits up to the end of the last code that ends here; 0 if none does.
};

// Reads a chunk from a state on. Calls visit(advance) where a code ends, until it returns false.
template <class Visit>
__device__ inline Step Read(const GolombStream& code, uint32_t chunk, int rice, int state,
                            Visit visit) {
  const uint32_t begin = chunk * kChunkBits;
  const uint32_t end = begin + kChunkBits < code.bits ? begin + kChunkBits : code.bits;
  Step step = {0, 0, 0, 0};
  uint32_t at = begin;
  bool inside = state > 0;  // Behind the zero of a code.
  while (at < end || inside) {
    if (inside) {
      const int take = state < static_cast<int>(end - at) ? state : static_cast<int>(end - at);
      if (take > 0) step.advance += int64_t{BitsAt(code.words, at, take)} << (rice - state);
      at += take;
      state -= take;
      if (state > 0) break;
      inside = false;
      ++step.codes;
      step.end = static_cast<uint16_t>(at - begin);
      if (!visit(step.advance)) break;
      continue;
    }
    const int ones_below = __ffs(static_cast<int>(~(code.words[at / 32] >> (at % 32))));
    uint32_t ones = ones_below == 0 ? 32 : ones_below - 1;  // Zeros came in from above.
    const uint32_t left = 32 - at % 32 < end - at ? 32 - at % 32 : end - at;
    const bool zero = ones < left;
    if (!zero) ones = left;
    step.advance += int64_t{ones} << rice;
    at += ones;
    if (!zero) continue;
    ++at;
    ++step.advance;
    inside = true;
    state = rice;
  }
  step.state = static_cast<uint16_t>(state);
  return step;
}

}  // namespace gpu
}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_GPU_GOLOMB_STREAM_CUH_
