// Block quantisation: a warp takes a pair of blocks, whose scales share a word. A lane makes whole
// words of codes, so nothing is written by two lanes.
#include "custom_ops/core/gpu/block.cuh"
#include "custom_ops/core/gpu/c_api.h"
#include "custom_ops/core/gpu/records.cuh"

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
          CeilDiv(size, 2 * block),
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

__device__ inline Step StepOf(const Format& format, float scale) {
  const float unit = scale / static_cast<float>(format.limit);
  return {unit, unit > 0 ? 1.0f / unit : 0.0f};
}

// What a scale of one step saves, see the CPU's: sums of 16 lanes, then of pairs of lanes. Both
// halves of the warp get the same.
__device__ inline float Saved(const float* x, uint32_t n, float scale) {
  const float half = 0.5f * scale;
  float sum = 0;
  for (uint32_t i = Lane() % 16; i < n; i += 16) {
    const float magnitude = __int_as_float(MagnitudeBits(x[i]));
    const float saved = magnitude + magnitude - scale;
    sum += magnitude > half ? saved : 0.0f;
  }
  for (int distance = 8; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, distance);
  }
  return sum * scale;
}

__device__ inline float ScaleOf(const Format& format, const float* x, uint32_t n, float largest) {
  constexpr float kShares[] = {1.0f, 0.8f, 0.6f, 0.45f};
  float best = RoundedUp(largest);
  if (format.bits > 2 || best == 0) return best;
  float most = Saved(x, n, best);
  for (const float share : kShares) {
    const float scale = RoundedUp(share * largest);
    const float saved = Saved(x, n, scale);
    if (saved > most) {
      best = scale;
      most = saved;
    }
  }
  return best;
}

// The nearest level in units, half to even: an integer, or, with 4 bits, 0, 1, 2, 3, 4, 6, 8, 12 or
// their negatives.
__device__ inline float Level(const Format& format, float steps) {
  const float size = format.bits == 4 ? __int_as_float(MagnitudeBits(steps)) : 0;
  const float round = size < 4.0f ? kRound : size < 8.0f ? 2.0f * kRound : 4.0f * kRound;
  return (steps + round) - round;
}

// A level's code: the integer; or, with 4 bits, a sign, at 8, and the place in the list above.
__device__ inline uint32_t Code(const Format& format, float level) {
  const auto units = static_cast<int32_t>(level);
  if (format.bits != 4) return static_cast<uint32_t>(units);
  const int32_t size = units < 0 ? -units : units;
  const int32_t place = size < 4 ? size : size < 8 ? 2 + size / 2 : 4 + size / 4;
  return static_cast<uint32_t>(place | (units < 0 ? 8 : 0));
}

// The units that the lowest bits of a word stand for, the inverse of `Code`.
__device__ inline int32_t Units(const Format& format, uint32_t word) {
  if (format.bits != 4) {  // Up to the top, and back down with its sign.
    return static_cast<int32_t>(word << (32 - format.bits)) >> (32 - format.bits);
  }
  const auto place = static_cast<int32_t>(word & 7);
  const int32_t size = place + (place > 4) + (place > 5) + 3 * (place > 6);
  return word & 8 ? -size : size;
}

// Codes a block by all lanes of a warp; returns its scale.
__device__ inline float QuantizeBlock(const Format& format, const float* x, uint32_t n,
                                      int32_t* codes, float* errors, bool* usable) {
  int32_t largest = 0;
  for (uint32_t i = Lane(); i < n; i += 32) largest = Max()(largest, MagnitudeBits(x[i]));
  largest = WarpReduce(largest, Max());
  if (largest >= kTooLarge) {
    *usable = false;
    return 0;
  }
  const float scale = ScaleOf(format, x, n, __int_as_float(largest));
  const Step step = StepOf(format, scale);
  const auto most = static_cast<float>(format.limit);
  const uint32_t mask = (1u << format.bits) - 1, per_word = 32 / format.bits;
  __syncwarp();  // `errors` may be `x`, which all lanes have read.
  for (uint32_t w = Lane(); w < n / per_word; w += 32) {
    uint32_t word = 0;
    for (uint32_t j = 0; j < per_word; ++j) {
      const uint32_t i = w * per_word + j;
      const float value = x[i];
      float steps = value * step.inverse;
      steps = steps < most ? steps : most;
      steps = steps > -most ? steps : -most;
      const float level = Level(format, steps);
      word |= (Code(format, level) & mask) << (j * format.bits);
      errors[i] = value - level * step.unit;
    }
    codes[w] = static_cast<int32_t>(word);
  }
  return scale;
}

__global__ void __launch_bounds__(kThreads)
    Quantize(Format format, const float* values, int32_t* messages, float* errors) {
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kWarps;
  const int64_t mine = static_cast<int64_t>(blockIdx.x) * kWarps + Warp();
  bool usable = true;
  for (int64_t item = mine; item < format.rows * format.pairs; item += warps) {
    const int64_t row = item / format.pairs, pair = item % format.pairs;
    int32_t* message = messages + row * format.words;
    uint32_t word = 0;
    for (int64_t side = 0; side < 2; ++side) {
      const int64_t begin = (2 * pair + side) * format.block;
      if (begin >= format.size) break;
      const int64_t left = format.size - begin;
      const auto n = static_cast<uint32_t>(left < format.block ? left : format.block);
      const int64_t at = row * format.size + begin;
      int32_t* codes = message + 1 + format.pairs + begin / 32 * format.bits;
      const float scale = QuantizeBlock(format, values + at, n, codes, errors + at, &usable);
      word |= static_cast<uint32_t>(__float_as_int(scale)) >> 16 << (16 * side);
    }
    if (Lane() == 0) message[1 + pair] = static_cast<int32_t>(word);
  }
  if (!usable && Lane() == 0) atomicMax(&messages[0], 1);  // Until Finish(): not usable.
}

// Clears all but the first flag if the first flag says that something is not usable.
__global__ void Clear(Format format, int32_t* messages) {
  if (messages[0] == 0) return;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int64_t i = 1 + first; i < format.rows * format.words; i += stride) messages[i] = 0;
}

// Writes the flags; one block.
__global__ void Finish(Format format, int32_t* messages) {
  __shared__ int32_t usable;
  if (threadIdx.x == 0) usable = messages[0] == 0;
  __syncthreads();
  for (int64_t row = threadIdx.x; row < format.rows; row += blockDim.x) {
    messages[row * format.words] = usable;
  }
}

__global__ void Dequantize(Format format, int32_t sum, const int32_t* messages, float* values) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t rows = sum ? 1 : format.rows;
  for (int64_t item = first; item < rows * format.size; item += stride) {
    const int64_t row = item / format.size, i = item % format.size, block = i / format.block;
    float total = 0;
    for (int64_t r = sum ? 0 : row; r < (sum ? format.rows : row + 1); ++r) {
      const int32_t* message = messages + r * format.words;
      const auto scales = static_cast<uint32_t>(message[1 + block / 2]);
      const uint32_t high = block % 2 != 0 ? scales & 0xffff0000u : scales << 16;
      const Step step = StepOf(format, __int_as_float(static_cast<int32_t>(high)));
      const int32_t bits = format.bits;
      const auto word = static_cast<uint32_t>(message[1 + format.pairs + i * bits / 32]);
      const float value = static_cast<float>(Units(format, word >> (i * bits % 32))) * step.unit;
      total = sum ? total + value : value;
    }
    values[item] = total;
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
  const uint32_t grid = GridFor(format.rows * format.pairs * 32);
  REDSYNC_LAUNCH(Quantize, grid, kThreads, stream, format, call->values, call->messages,
                 call->errors);
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
  REDSYNC_LAUNCH(Dequantize, GridFor(items), kThreads, static_cast<cudaStream_t>(stream_pointer),
                 format, call->sum, call->messages, call->values);
  return LaunchStatus();
}
