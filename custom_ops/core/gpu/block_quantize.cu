// Block quantization. A warp handles a pair of blocks, whose scales share a word; a lane handles
// eight neighbours at a time.
#include "custom_ops/core/gpu/block.cuh"
#include "custom_ops/core/gpu/c_api.h"
#include "custom_ops/core/gpu/records.cuh"
#include "custom_ops/core/gpu/vector_access.cuh"

namespace redsync {
namespace gpu {
namespace {

constexpr int32_t kTooLarge = 0x7e800000;  // The bits of 2^126.
constexpr float kSmallest = 0x1p-100f;     // Blocks below it are zeros.
constexpr float kRound = 0x1.8p23f;        // x + kRound rounds x to an integer, in its low bits.

struct Format {
  int64_t block, rows, size, pairs, words;
  int32_t bits, limit;
};

inline Format FormatOf(int64_t bits, int64_t block, int64_t rows, int64_t size) {
  const int64_t words = redsync_gpu_block_words(bits, block, size);
  return {block,
          rows,
          size,
          words < 0 ? 0 : CeilDiv(size, 2 * block),
          words,
          static_cast<int32_t>(bits),
          bits == 4 ? 12 : (1 << (bits - 1)) - 1};
}

__device__ inline int32_t MagnitudeBits(float x) { return __float_as_int(x) & 0x7fffffff; }

__device__ inline float RoundedUp(float scale) {
  const uint32_t bits = static_cast<uint32_t>(__float_as_int(scale)) + 0xffffu;
  const float up = __int_as_float(static_cast<int32_t>(bits & 0xffff0000u));
  return up < kSmallest ? 0.0f : up;
}

struct Step {
  float unit, inverse;
};

__device__ inline float UnitOf(const Format& format, float scale) {
  return scale / static_cast<float>(format.limit);
}

__device__ inline Step StepOf(const Format& format, float scale) {
  const float unit = UnitOf(format, scale);
  return {unit, unit > 0 ? 1.0f / unit : 0.0f};
}

// Eight neighbours, which a thread loads and stores together.
struct Vec8 {
  Vec4 half[2];

  __device__ float& operator[](int i) { return half[i / 4].at[i % 4]; }
  __device__ float operator[](int i) const { return half[i / 4].at[i % 4]; }
};
constexpr uint32_t kEach = 8;
constexpr uint32_t kTile = 32 * kEach;  // Elements that a warp handles at a time.

// Loads eight neighbours, zeros beyond the end.
__device__ inline Vec8 LoadVec8(const float* x, uint32_t at, uint32_t n, bool aligned) {
  return {{Load(x, at, n, aligned), Load(x, at + 4, n, aligned)}};
}

__device__ inline void StoreVec8(float* x, uint32_t at, uint32_t n, bool aligned, const Vec8& vec) {
  Store(x, at, n, aligned, vec.half[0]);
  Store(x, at + 4, n, aligned, vec.half[1]);
}

constexpr int64_t kMostBlocks = 1 << 20;  // Items are large: fewer blocks would leave some idle.

constexpr int kScales = 4;  // Number of scales to choose from with 2 bits.

// Writes the reduction of the sum of squares by each scale, as on the CPU: sums of 16 lanes, then
// of pairs of lanes. Half of the warp sums for the first two scales, half for the others.
__device__ inline void Saved(const float* x, uint32_t n, const float* scales, float* saved) {
  const bool upper = Lane() >= 16;
  const float scale[] = {upper ? scales[2] : scales[0], upper ? scales[3] : scales[1]};
  float sum[] = {0.0f, 0.0f};
  for (uint32_t i = Lane() % 16; i < n; i += 16) {
    const float magnitude = __int_as_float(MagnitudeBits(x[i]));
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const float term = magnitude + magnitude - scale[s];
      sum[s] += magnitude > 0.5f * scale[s] ? term : 0.0f;
    }
  }
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    for (int distance = 8; distance > 0; distance /= 2) {
      sum[s] += __shfl_xor_sync(kAllLanes, sum[s], distance);
    }
    saved[s] = __shfl_sync(kAllLanes, sum[s], 0) * scales[s];
    saved[s + 2] = __shfl_sync(kAllLanes, sum[s], 16) * scales[s + 2];
  }
}

template <int kBits>
__device__ inline float ScaleOf(const float* x, uint32_t n, float largest) {
  const float whole = RoundedUp(largest);
  if (kBits > 2 || whole == 0) return whole;
  const float scales[kScales] = {whole, RoundedUp(0.8f * largest), RoundedUp(0.6f * largest),
                                 RoundedUp(0.45f * largest)};
  float saved[kScales];
  Saved(x, n, scales, saved);
  float best = whole, most = saved[0];
#pragma unroll
  for (int s = 1; s < kScales; ++s) {
    if (saved[s] <= most) continue;
    best = scales[s];
    most = saved[s];
  }
  return best;
}

// Returns the nearest level in units, half to even: an integer, or, with 4 bits, 0, 1, 2, 3, 4, 6,
// 8, 12 or their negatives.
template <int kBits>
__device__ inline float Level(float steps) {
  if (kBits != 4) return (steps + kRound) - kRound;
  const float size = __int_as_float(MagnitudeBits(steps));
  const float round = size < 4.0f ? kRound : size < 8.0f ? 2.0f * kRound : 4.0f * kRound;
  return (steps + round) - round;
}

// Returns a level's code: the integer or, with 4 bits, the index in the list above plus 8 if
// negative.
template <int kBits>
__device__ inline uint32_t Code(float level) {
  const auto units = static_cast<int32_t>(level);
  if (kBits != 4) return static_cast<uint32_t>(units) & ((1u << kBits) - 1);
  const int32_t size = units < 0 ? -units : units;
  const int32_t place = size < 4 ? size : size < 8 ? 2 + size / 2 : 4 + size / 4;
  return static_cast<uint32_t>(place | (units < 0 ? 8 : 0));
}

// Decodes the lowest bits of a word to units, the inverse of `Code`.
template <int kBits>
__device__ inline int32_t Units(uint32_t word) {
  if (kBits != 4) {  // Shift up, then down with sign extension.
    return static_cast<int32_t>(word << (32 - kBits)) >> (32 - kBits);
  }
  const auto place = static_cast<int32_t>(word & 7);
  const int32_t size = place + (place > 4) + (place > 5) + 3 * (place > 6);
  return word & 8 ? -size : size;
}

// Codes eight neighbours, and replaces them by their errors. Returns the codes as low bits.
template <int kBits>
__device__ inline uint64_t Encode(const Format& format, const Step& step, Vec8* x) {
  const auto most = static_cast<float>(format.limit);
  uint64_t codes = 0;
#pragma unroll
  for (int i = 0; i < static_cast<int>(kEach); ++i) {
    const float value = (*x)[i];
    float steps = value * step.inverse;
    steps = steps < most ? steps : most;
    steps = steps > -most ? steps : -most;
    const float level = Level<kBits>(steps);
    codes |= uint64_t{Code<kBits>(level)} << (i * kBits);
    (*x)[i] = value - level * step.unit;
  }
  return codes;
}

// Writes the codes of eight neighbours from `at` on. All lanes of a warp must call it; lanes beyond
// the end do not write.
template <int kBits>
__device__ inline void StoreCodes(int32_t* words, uint32_t at, uint32_t n, uint64_t codes) {
  int32_t* place = words + at / 32 * kBits + at % 32 * kBits / 32;
  const auto low = static_cast<uint32_t>(codes);
  if (kBits == 2) {  // Two lanes share a word.
    const uint32_t next = __shfl_xor_sync(kAllLanes, low, 1);
    if (at < n && Lane() % 2 == 0) place[0] = static_cast<int32_t>(low | next << 16);
    return;
  }
  if (at >= n) return;
  place[0] = static_cast<int32_t>(low);
  if (kBits == 8) place[1] = static_cast<int32_t>(static_cast<uint32_t>(codes >> 32));
}

__device__ inline int32_t LargestOf(const Vec8& x) {
  int32_t largest = 0;
#pragma unroll
  for (int i = 0; i < static_cast<int>(kEach); ++i) {
    largest = Max()(largest, MagnitudeBits(x[i]));
  }
  return largest;
}

// A block of a row, with this lane's first eight elements, `values`, and its codes in the message.
struct Block {
  const float* x;
  float* errors;
  int32_t* codes;
  uint32_t n;
  Vec8 values;
};

// Codes a block with all lanes of a warp; returns its scale, or -1 if a value is too large.
template <int kBits>
__device__ inline float QuantizeBlock(const Format& format, bool aligned, Block block) {
  const uint32_t first = Lane() * kEach;
  int32_t largest = LargestOf(block.values);
  for (uint32_t at = first + kTile; at < block.n; at += kTile) {
    largest = Max()(largest, LargestOf(LoadVec8(block.x, at, block.n, aligned)));
  }
  largest = WarpReduce(largest, Max());
  if (largest >= kTooLarge) return -1;
  const float scale = ScaleOf<kBits>(block.x, block.n, __int_as_float(largest));
  const Step step = StepOf(format, scale);
  __syncwarp();  // `errors` may be `x`, which all lanes have read.
  for (uint32_t base = 0; base < block.n; base += kTile) {
    const uint32_t at = base + first;
    if (base != 0) block.values = LoadVec8(block.x, at, block.n, aligned);
    StoreCodes<kBits>(block.codes, at, block.n, Encode<kBits>(format, step, &block.values));
    StoreVec8(block.errors, at, block.n, aligned, block.values);
  }
  return scale;
}

template <int kBits>
__global__ void __launch_bounds__(kThreads)
    Quantize(Format format, const float* values, int32_t* messages, float* errors, bool aligned) {
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kWarps;
  const int64_t first_item = static_cast<int64_t>(blockIdx.x) * kWarps + Warp();
  bool usable = true;
  for (int64_t item = first_item; item < format.rows * format.pairs; item += warps) {
    const int64_t row = item / format.pairs, pair = item % format.pairs;
    int32_t* message = messages + row * format.words;
    Block blocks[2];
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int64_t begin = (2 * pair + side) * format.block, left = format.size - begin;
      const int64_t n = left < 0 ? 0 : left < format.block ? left : format.block;
      const int64_t at = row * format.size + (n == 0 ? 0 : begin);
      int32_t* codes = message + 1 + format.pairs + begin / 32 * format.bits;
      blocks[side] = {values + at, errors + at, codes, static_cast<uint32_t>(n), {}};
      blocks[side].values = LoadVec8(values + at, Lane() * kEach, blocks[side].n, aligned);
    }
    uint32_t word = 0;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      if (blocks[side].n == 0) break;
      const float scale = QuantizeBlock<kBits>(format, aligned, blocks[side]);
      if (scale < 0) {
        usable = false;
      } else {
        word |= static_cast<uint32_t>(__float_as_int(scale)) >> 16 << (16 * side);
      }
    }
    if (Lane() == 0) message[1 + pair] = static_cast<int32_t>(word);
  }
  if (!usable && Lane() == 0) atomicMax(&messages[0], 1);  // Until Finish(), 1 means unusable.
}

// Clears all words except the first flag if it marks an unusable row.
__global__ void Clear(Format format, int32_t* messages) {
  if (messages[0] == 0) return;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int64_t i = 1 + first; i < format.rows * format.words; i += stride) messages[i] = 0;
}

// Writes the flags, in one block.
__global__ void Finish(Format format, int32_t* messages) {
  __shared__ int32_t usable;
  if (threadIdx.x == 0) usable = messages[0] == 0;
  __syncthreads();
  for (int64_t row = threadIdx.x; row < format.rows; row += blockDim.x) {
    messages[row * format.words] = usable;
  }
}

// Returns the codes of eight neighbours, from `at` on, as low bits.
template <int kBits>
__device__ inline uint64_t LoadCodes(const int32_t* words, int64_t at) {
  const int64_t place = at / 32 * kBits + at % 32 * kBits / 32;
  const auto low = static_cast<uint32_t>(words[place]);
  if (kBits == 2) return low >> (at % 16 * kBits);
  if (kBits == 4) return low;
  return low | uint64_t{static_cast<uint32_t>(words[place + 1])} << 32;
}

// Decodes; a thread handles eight neighbours, of a row or of the sum of all rows.
template <int kBits>
__global__ void __launch_bounds__(kThreads)
    Dequantize(Format format, bool sum, const int32_t* messages, float* values, bool aligned) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t of_row = format.size / kEach, items = sum ? of_row : format.rows * of_row;
  for (int64_t item = first; item < items; item += stride) {
    const int64_t row = sum ? 0 : item / of_row, at = (item - row * of_row) * kEach;
    const int64_t block = at / format.block;
    Vec8 total = {};
    for (int64_t r = row; r < (sum ? format.rows : row + 1); ++r) {
      const int32_t* message = messages + r * format.words;
      const auto scales = static_cast<uint32_t>(message[1 + block / 2]);
      const uint32_t high = block % 2 != 0 ? scales & 0xffff0000u : scales << 16;
      const float unit = UnitOf(format, __int_as_float(static_cast<int32_t>(high)));
      const uint64_t codes = LoadCodes<kBits>(message + 1 + format.pairs, at);
#pragma unroll
      for (int i = 0; i < static_cast<int>(kEach); ++i) {
        const auto code = static_cast<uint32_t>(codes >> (i * kBits));
        const float value = static_cast<float>(Units<kBits>(code)) * unit;
        total[i] = sum ? total[i] + value : value;
      }
    }
    StoreVec8(values + item * kEach, 0, kEach, aligned, total);
  }
}

}  // namespace
}  // namespace gpu
}  // namespace redsync

using namespace redsync::gpu;  // NOLINT: the C interface below is this file's other half.

int64_t redsync_gpu_block_words(int64_t bits, int64_t block, int64_t size) {
  const bool known = bits == 8 || bits == 4 || bits == 2;
  if (!known || block < 1 || block % 32 != 0 || block > INT32_MAX || size < 0 || size % 32 != 0) {
    return -1;
  }
  return 1 + CeilDiv(size, 2 * block) + size / 32 * bits;
}

int redsync_gpu_block_quantize(const RedsyncGpuBlockQuantize* call, void* stream_pointer) {
  const Format format = FormatOf(call->bits, call->block, call->rows, call->size);
  if (format.words < 0 || call->rows < 0) return REDSYNC_GPU_INVALID_ARGUMENT;
  if (call->rows == 0) return REDSYNC_GPU_OK;
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  cudaMemsetAsync(call->messages, 0, sizeof(int32_t), stream);
  const bool aligned = IsAligned(call->values) && IsAligned(call->errors);
  auto kernel = call->bits == 8 ? Quantize<8> : call->bits == 4 ? Quantize<4> : Quantize<2>;
  REDSYNC_LAUNCH(kernel, GridFor(format.rows * format.pairs * 32, kMostBlocks), kThreads, stream,
                 format, call->values, call->messages, call->errors, aligned);
  REDSYNC_LAUNCH(Clear, GridFor(format.rows * format.words), kThreads, stream, format,
                 call->messages);
  REDSYNC_LAUNCH(Finish, 1, kThreads, stream, format, call->messages);
  return LaunchStatus();
}

int redsync_gpu_block_dequantize(const RedsyncGpuBlockDequantize* call, void* stream_pointer) {
  const Format format = FormatOf(call->bits, call->block, call->rows, call->size);
  if (format.words < 0 || call->rows < 0) return REDSYNC_GPU_INVALID_ARGUMENT;
  const int64_t items = call->sum != 0 ? call->size : call->rows * call->size;
  if (items == 0) return REDSYNC_GPU_OK;
  auto kernel = call->bits == 8 ? Dequantize<8> : call->bits == 4 ? Dequantize<4> : Dequantize<2>;
  REDSYNC_LAUNCH(kernel, GridFor(items / kEach, kMostBlocks), kThreads,
                 static_cast<cudaStream_t>(stream_pointer), format, call->sum != 0, call->messages,
                 call->values, IsAligned(call->values));
  return LaunchStatus();
}
