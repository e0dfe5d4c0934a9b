// Radix selection of a cut: the k largest magnitudes are above it, or equal to it.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_GPU_DIGITS_CUH_
#define TF_REDSYNC_CUSTOM_OPS_CORE_GPU_DIGITS_CUH_

#include "custom_ops/core/gpu/block.cuh"

namespace redsync {
namespace gpu {

// Every level handles some of a magnitude's 31 bits, from the top.
constexpr int kBins = 2048;
constexpr int kLevels = 3;
__device__ inline int LevelShift(int level) { return 20 - 10 * level; }
__device__ inline int LevelBits(int level) { return level == 0 ? 11 : 10; }

// Returns the key of a candidate: one word with the magnitude above the index.
__device__ inline uint64_t MakeKey(int32_t magnitude, uint32_t index) {
  return static_cast<uint64_t>(static_cast<uint32_t>(magnitude)) << 32 | index;
}
__device__ inline int32_t KeyMagnitude(uint64_t key) { return static_cast<int32_t>(key >> 32); }
__device__ inline uint32_t KeyIndex(uint64_t key) { return static_cast<uint32_t>(key); }

// State of a radix selection of the element of a given rank; initially zero.
struct Digits {
  int32_t done;    // Whether the remaining levels can be skipped.
  int32_t prefix;  // Bits found so far.
  uint32_t above;  // Elements above all elements with this prefix.
  // The result: elements above `cut` are selected, and the first `ties` elements equal to it.
  int32_t cut;
  uint32_t ties;
};

__device__ inline void ClearBins(uint32_t* bins) {
  for (int b = threadIdx.x; b < kBins; b += kThreads) bins[b] = 0;
  __syncthreads();
}

__device__ inline void AddBins(const uint32_t* bins, uint32_t* histogram) {
  __syncthreads();
  for (int b = threadIdx.x; b < kBins; b += kThreads) {
    if (bins[b] != 0) atomicAdd(&histogram[b], bins[b]);
  }
}

// The bin of the element of a given rank (1 is the largest).
struct Bin {
  bool found;      // Whether there are at least that many elements.
  int32_t bin;     // 0 if not found.
  uint32_t above;  // Elements in higher bins.
  uint32_t count;  // Elements in this bin.
};

__device__ inline Bin FindBin(const uint32_t* bins, uint32_t rank) {
  __shared__ Bin result;
  const int strip = kBins / blockDim.x;  // A thread's bins; the first thread has the highest.
  const int highest = kBins - 1 - static_cast<int>(threadIdx.x) * strip;
  uint32_t strip_sum = 0, total;
  for (int i = 0; i < strip; ++i) strip_sum += bins[highest - i];
  uint32_t above = BlockScan(strip_sum, &total);
  if (threadIdx.x == 0 && total < rank) result = {false, 0, total, 0};
  if (above < rank && rank <= above + strip_sum) {
    int bin = highest;
    while (above + bins[bin] < rank) above += bins[bin--];
    result = {true, bin, above, bins[bin]};
  }
  __syncthreads();
  return result;  // The next call writes `result` after the barriers of its scan.
}

// State that the blocks of one selection share; initially zero.
struct Histogram {
  uint32_t ticket;       // See IsLastBlock().
  uint32_t bins[kBins];  // Zero between uses.
};

// Ends a level, in the last block. A `Source` has the keys [i], rank(), and the callbacks
// Found(equal, digits) and NotFound(total, digits) for the end.
template <class Source>
__device__ inline void EndLevel(const Source& source, int level, Histogram* histogram,
                                Digits* digits) {
  const Bin bin = FindBin(histogram->bins, source.rank() - digits->above);
  ClearBins(histogram->bins);
  if (threadIdx.x != 0) return;
  digits->above += bin.above;
  digits->prefix = digits->prefix << LevelBits(level) | bin.bin;
  if (!bin.found) {
    digits->done = 1;
    source.NotFound(bin.above, digits);
  } else if (level == kLevels - 1) {
    digits->cut = digits->prefix;
    source.Found(bin.count, digits);
  }
}

// Counts the elements of `part` with the prefix found so far; the last block finds the next digit.
// `bins` is shared memory.
template <class Source>
__device__ inline void NextDigit(const Source& source, Range part, int level, uint32_t blocks,
                                 uint32_t* bins, Histogram* histogram, Digits* digits) {
  const int shift = LevelShift(level), bits = LevelBits(level);
  const int32_t prefix = digits->prefix;
  ClearBins(bins);
  for (uint32_t i = threadIdx.x; i < part.count; i += kThreads) {
    const int32_t m = KeyMagnitude(source[part.begin + i]);
    if (m > 0 && static_cast<int64_t>(m) >> (shift + bits) == prefix) {
      atomicAdd(&bins[m >> shift & ((1 << bits) - 1)], 1u);
    }
  }
  AddBins(bins, histogram->bins);
  if (IsLastBlock(&histogram->ticket, blocks)) EndLevel(source, level, histogram, digits);
}

}  // namespace gpu
}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_GPU_DIGITS_CUH_
