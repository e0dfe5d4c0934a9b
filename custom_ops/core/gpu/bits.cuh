// Bits in words: reading, packing, and writing codes of variable lengths.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_GPU_BITS_CUH_
#define TF_REDSYNC_CUSTOM_OPS_CORE_GPU_BITS_CUH_

#include "custom_ops/core/gpu/bits_api.h"
#include "custom_ops/core/gpu/block.cuh"
#include "custom_ops/core/gpu/divider.cuh"
#include "custom_ops/core/gpu/platform.cuh"

namespace redsync {
namespace gpu {

constexpr int64_t kMaxCodeBits = 32;
constexpr int64_t kMaxRice = 30;
constexpr int64_t kMaxBitmapWords = int64_t{1} << 26;
constexpr int64_t kMaxListedWords = kMaxBitmapWords - 1;  // Counts of their bits are int32.

__host__ __device__ inline int64_t PackedWords(int64_t count, int64_t bits) {
  return (count * bits + 31) / 32;
}

// Returns `count` bits, at most 32, from bit `at` on. Reads only the words that contain them.
__device__ inline uint32_t BitsAt(const uint32_t* words, int64_t at, int count) {
  if (count == 0) return 0;
  const int shift = static_cast<int>(at % 32);
  uint64_t both = words[at / 32];
  if (shift + count > 32) both |= uint64_t{words[at / 32 + 1]} << 32;
  return static_cast<uint32_t>(both >> shift & ((uint64_t{1} << count) - 1));
}

// Returns word number `word` of packed codes: the low `bits` bits of code(0), .., code(count - 1).
template <class Code>
__device__ inline uint32_t PackedWord(int64_t word, int64_t count, int64_t bits, Code code) {
  const uint64_t mask = (uint64_t{1} << bits) - 1;
  const int64_t begin = 32 * word;
  uint64_t packed = 0;
  int64_t i = begin / bits;  // The code of the word's first bit.
  for (int64_t at = i * bits - begin; at < 32 && i < count; ++i, at += bits) {
    const uint64_t low = code(i) & mask;
    packed |= at < 0 ? low >> -at : low << at;
  }
  return static_cast<uint32_t>(packed);
}

// Lists the set bits of word number `word` in the slots from `at` on, as far as there are slots.
__device__ inline void ListBits(uint32_t bits, uint32_t word, uint32_t at, uint32_t slots,
                                uint32_t* positions) {
  for (; bits != 0 && at < slots; bits &= bits - 1) {
    positions[at++] = 32 * word + __ffs(static_cast<int>(bits)) - 1;
  }
}

// The identity map of codes.
struct Plain {
  __device__ uint32_t operator()(uint32_t code) const { return code; }
};

// Maps integers 0, -1, 1, .. to zigzag numbers 0, 1, 2, ..
struct ZigZag {
  __device__ uint32_t operator()(uint32_t x) const { return x << 1 ^ (0 - (x >> 31)); }
};

// Packs the low bits of map(code), one thread per word.
template <class Map>
__global__ void __launch_bounds__(kThreads)
    Pack(REDSYNC_PARAMETER RedsyncGpuPackedCodes call, REDSYNC_PARAMETER Map map) {
  const int64_t words = PackedWords(call.count, call.bits);
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t w = int64_t{blockIdx.x} * kThreads + threadIdx.x; w < call.rows * words;
       w += stride) {
    const uint32_t* codes = call.in + w / words * call.count;
    call.out[w] =
        PackedWord(w % words, call.count, call.bits, [&](int64_t i) { return map(codes[i]); });
  }
}

template <class Map>
inline void LaunchPack(const RedsyncGpuPackedCodes& call, Map map, cudaStream_t stream) {
  const int64_t words = call.rows * PackedWords(call.count, call.bits);
  if (words > 0) REDSYNC_LAUNCH(Pack<Map>, GridFor(words), kThreads, stream, call, map);
}

// Writes concatenated codes of variable length, whose starts are prefix sums of the lengths.
//
// A `Source` has `count`, Length(i) in bits, and Put(i, at), which writes code i at bit `at`.
constexpr uint32_t kCodesOfBlock = 4 * kThreads;

// Prefix sums of the lengths before each block, and the ticket for the last block.
struct Lengths {
  uint32_t* ticket;
  Tally<1, Wide>* before;  // [blocks]
  uint32_t blocks;

  Lengths(int64_t count, Divider* divider)
      : ticket(divider->Take<uint32_t>(1)),
        before(divider->Take<Tally<1, Wide>>(CeilDiv(count, kCodesOfBlock))),
        blocks(static_cast<uint32_t>(CeilDiv(count, kCodesOfBlock))) {}
};

template <class Source>
__global__ void __launch_bounds__(kThreads)
    Measure(REDSYNC_PARAMETER Source source, REDSYNC_PARAMETER Lengths lengths) {
  const int64_t begin = int64_t{blockIdx.x} * kCodesOfBlock;
  Wide bits = 0;
  for (uint32_t j = threadIdx.x; j < kCodesOfBlock && begin + j < source.count; j += kThreads) {
    bits += source.Length(begin + j);
  }
  bits = BlockReduce(bits, Add());
  if (threadIdx.x == 0) lengths.before[blockIdx.x] = {{bits}};
  if (IsLastBlock(lengths.ticket, lengths.blocks)) ScanTallies(lengths.before, lengths.blocks);
}

template <class Source>
__global__ void __launch_bounds__(kThreads)
    Write(REDSYNC_PARAMETER Source source, REDSYNC_PARAMETER Lengths lengths) {
  const int64_t begin = int64_t{blockIdx.x} * kCodesOfBlock;
  Wide at = lengths.before[blockIdx.x].at[0];
  for (uint32_t j = 0; j < kCodesOfBlock; j += kThreads) {
    const int64_t i = begin + j + threadIdx.x;
    Wide all;
    const Wide start = at + BlockScan(i < source.count ? source.Length(i) : Wide{0}, &all);
    if (i < source.count) source.Put(i, start);
    at += all;
  }
}

template <class Source>
inline void LaunchWrite(const Source& source, const Lengths& lengths, cudaStream_t stream) {
  cudaMemsetAsync(lengths.ticket, 0, sizeof(uint32_t), stream);
  if (lengths.blocks == 0) return;
  REDSYNC_LAUNCH(Measure<Source>, lengths.blocks, kThreads, stream, source, lengths);
  REDSYNC_LAUNCH(Write<Source>, lengths.blocks, kThreads, stream, source, lengths);
}

}  // namespace gpu
}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_GPU_BITS_CUH_
