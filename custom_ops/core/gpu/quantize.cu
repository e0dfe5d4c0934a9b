// Quantization to codes of a few bits. A thread codes four neighbours, which share a bucket and a
// block of random numbers. A warp's 128 codes fill whole words, so warps write different words.
#include "custom_ops/core/gpu/block.cuh"
#include "custom_ops/core/gpu/quantized_format.cuh"
#include "custom_ops/core/gpu/records.cuh"
#include "custom_ops/core/message_layout.h"

namespace redsync {
namespace gpu {
namespace {

constexpr uint32_t kPerWarp = 32 * 4;           // Elements that a warp codes together.
constexpr uint32_t kRound = kWarps * kPerWarp;  // Elements that a block codes together.
constexpr uint32_t kTile = 4 * kRound;          // Elements of a block.

struct Call : QuantizedGroup {
  const float* scales;
  const int32_t* stream;
  int32_t* message;
  int32_t* not_finite;
  RedsyncGpuRecord* record;
};

struct Words4 {
  uint32_t at[4];
};

// Philox4x32-10, see Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
__device__ inline Words4 Philox(uint32_t key0, uint32_t key1, uint32_t a, uint32_t b, uint32_t c,
                                uint32_t d) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t p = uint64_t{0xD2511F53u} * a, q = uint64_t{0xCD9E8D57u} * c;
    a = static_cast<uint32_t>(q >> 32) ^ b ^ key0;
    c = static_cast<uint32_t>(p >> 32) ^ d ^ key1;
    b = static_cast<uint32_t>(q);
    d = static_cast<uint32_t>(p);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {{a, b, c, d}};
}

// Rounds y >= 0 up with probability y - floor(y), else down.
__device__ inline int32_t RoundAtRandom(float y, uint32_t random) {
  const int32_t floor = static_cast<int32_t>(y);
  const float uniform = static_cast<float>(static_cast<int32_t>(random >> 8)) * 0x1p-24f;
  return floor + (uniform < y - static_cast<float>(floor) ? 1 : 0);
}

__device__ inline int32_t Encode(const RedsyncGpuQuantizer& q, float x, const Levels& levels,
                                 uint32_t random) {
  if (IsBinary(q)) return x >= 0 ? 1 : 0;
  if (q.mode == REDSYNC_GPU_TERNARY) {
    return 1 + (x >= levels.high ? 1 : 0) - (x <= -levels.high ? 1 : 0);
  }
  const auto bits = static_cast<uint32_t>(__float_as_int(x));
  const uint32_t magnitude = bits & INT32_MAX;
  if (q.mode == REDSYNC_GPU_NATURAL) {
    return static_cast<int32_t>(((magnitude + (random >> 9)) >> 23 << 1) | bits >> 31);
  }
  const float s = static_cast<float>(levels.zero);
  if (q.mode == REDSYNC_GPU_UNIFORM) {
    const float y = (x / levels.high + 1.0f) * (s * 0.5f);
    const float positive = y > 0.0f ? y : 0.0f;  // 0 if y is NaN.
    return RoundAtRandom(positive < s ? positive : s, random);
  }
  const float y = (__int_as_float(static_cast<int32_t>(magnitude)) / levels.high) * s;
  const int32_t level = RoundAtRandom(y < s ? y : s, random);  // s if y is NaN.
  return levels.zero + (x < 0 ? -level : level);
}

// Copies the scales to the message; returns whether this thread's scales are finite.
__device__ inline bool CopyScales(const Call& call, const Coded& to, int item_index) {
  bool finite = true;
  const int64_t stride = int64_t{call.Blocks(item_index)} * kThreads;
  for (int64_t i = int64_t{call.Block(item_index)} * kThreads + threadIdx.x; i < to.scales;
       i += stride) {
    const float scale = to.size == 0 ? 0 : call.scales[to.scales_at - 1 + i];
    call.message[to.scales_at + i] = __float_as_int(scale);
    finite = finite && IsFinite(__float_as_int(scale));
    const bool any_sign = call.quantizer.mode == REDSYNC_GPU_TWO_LEVEL;
    if (!any_sign && scale < 0) Report(call.record, to.scales_at - 1 + i);
  }
  return finite;
}

// Codes four elements, the first one lowest, from `at` on in a block of `size` elements that begins
// at `base`.
__device__ inline uint64_t EncodeFour(const Call& call, const Coded& to, int64_t base, uint32_t at,
                                      uint32_t size, bool* finite) {
  if (at >= size) return 0;
  const RedsyncGpuQuantizer& q = call.quantizer;
  const int64_t first = ScalesPerBucket(q) * to.BucketOf(base + at);
  const Levels levels = MakeLevels(q, call.scales + to.scales_at - 1 + first);
  Words4 random = {};
  if (IsStochastic(q)) {
    const int32_t* stream = call.stream;
    const auto number = static_cast<uint64_t>(base + at) / 4;
    random = Philox(stream[0], stream[1], static_cast<uint32_t>(number),
                    static_cast<uint32_t>(number >> 32), to.number, stream[2]);
  }
  Vec4 x = Load(to.in + base, at, size, to.aligned);
  uint64_t codes = 0;
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const int32_t code = Encode(q, x.at[c], levels, random.at[c]);
    *finite = *finite && IsFinite(__float_as_int(x.at[c])) && code <= MaxCode(q);
    if (at + c < size) codes |= static_cast<uint64_t>(code) << (c * call.bits);
    x.at[c] -= ValueOf(q, levels, static_cast<uint32_t>(code));
  }
  if (to.out != nullptr) Store(to.out + base, at, size, to.aligned, x);
  return codes;
}

// Sets bits in words in which other threads set bits, too.
__device__ inline void OrBits(uint32_t* words, uint32_t at, uint64_t bits) {
  const int shift = at % 32;
  const uint64_t rest = bits >> (32 - shift);  // Bits beyond the first word.
  const uint32_t parts[] = {static_cast<uint32_t>(bits << shift), static_cast<uint32_t>(rest),
                            static_cast<uint32_t>(rest >> 32)};
  for (int w = 0; w < 3; ++w) {
    if (parts[w] != 0) atomicOr(&words[at / 32 + w], parts[w]);
  }
}

__global__ void __launch_bounds__(kThreads) Quantize(REDSYNC_PARAMETER Call call) {
  const int item_index = call.Find();
  const Coded& to = call.items[item_index];
  __shared__ uint32_t of_warp[kWarps][4 * kMaxBits];
  uint32_t* packed = of_warp[Warp()];
  const int words = 4 * call.bits;  // Words of a warp's codes.
  bool finite = CopyScales(call, to, item_index);
  const int64_t base = int64_t{call.Block(item_index)} * kTile;
  const uint32_t size = PartSize(to.size, base, kTile);
  for (uint32_t begin = Warp() * kPerWarp; begin < size; begin += kRound) {
    const uint64_t codes = EncodeFour(call, to, base, begin + Lane() * 4, size, &finite);
    for (int w = Lane(); w < words; w += 32) packed[w] = 0;  // The lane that has read it clears it.
    __syncwarp();
    OrBits(packed, Lane() * words, codes);
    __syncwarp();
    const int64_t first = (base + begin) / 32 * call.bits;
    for (int w = Lane(); w < words && first + w < to.words; w += 32) {
      call.message[to.words_at + first + w] = static_cast<int32_t>(packed[w]);
    }
  }
  if (!finite) *call.not_finite = 1;
}

__global__ void Finish(REDSYNC_PARAMETER Call call, int64_t words) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (first == 0 && !IsClear(*call.record)) {
    call.record->value = __float_as_int(call.scales[call.record->position]);
  }
  if (*call.not_finite == 0) {
    if (first == 0) call.message[0] = 1;
    return;
  }
  for (int64_t i = first; i < words; i += stride) call.message[i] = 0;
}

}  // namespace
}  // namespace gpu
}  // namespace redsync

using namespace redsync::gpu;  // NOLINT: the C interface below is this file's other half.

int64_t redsync_gpu_quantized_words(const RedsyncGpuQuantizer* q, const RedsyncGpuDense* tensors,
                                    int64_t count) {
  if (q->mode < REDSYNC_GPU_SIGN || q->mode > REDSYNC_GPU_NATURAL || q->levels < 1 ||
      q->levels > MaxLevels(*q) || q->bucket < 0 || q->bucket > INT32_MAX || q->bucket % 32 != 0) {
    return -1;
  }
  int64_t words = redsync::kHeaderWords;
  for (int64_t i = 0; i < count; ++i) {
    if (tensors[i].size < 0) return -1;
    words += Scales(*q, tensors[i].size) + Words(*q, tensors[i].size);
  }
  return words;
}

int64_t redsync_gpu_quantize_scratch_bytes(void) { return sizeof(int32_t); }

int redsync_gpu_quantize(const RedsyncGpuQuantize* call, RedsyncGpuRecord* record, void* scratch,
                         int64_t scratch_bytes, void* stream_pointer) {
  const int64_t words = redsync_gpu_quantized_words(&call->quantizer, call->tensors, call->count);
  if (words < 0) return REDSYNC_GPU_INVALID_ARGUMENT;
  if (scratch_bytes < redsync_gpu_quantize_scratch_bytes()) return REDSYNC_GPU_SCRATCH_TOO_SMALL;
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  ClearRecord(record, stream);
  cudaMemsetAsync(scratch, 0, sizeof(int32_t), stream);
  Call group = {};
  group.quantizer = call->quantizer;
  group.scales = call->scales;
  group.stream = call->stream;
  group.message = call->message;
  group.not_finite = static_cast<int32_t*>(scratch);
  group.record = record;
  ForTensors(group, call->tensors, call->count, kTile, [&](const Call& part, uint32_t blocks) {
    REDSYNC_LAUNCH(Quantize, blocks, kThreads, stream, part);
  });
  REDSYNC_LAUNCH(Finish, GridFor(words), kThreads, stream, group, words);
  return LaunchStatus();
}

int redsync_gpu_explain_quantize(const RedsyncGpuQuantize* call, const RedsyncGpuRecord* record,
                                 RedsyncGpuCodecError* error) {
  if (IsClear(*record)) return 0;
  int64_t tensor = 0, slot = static_cast<int64_t>(record->position);
  for (; slot >= Scales(call->quantizer, call->tensors[tensor].size); ++tensor) {
    slot -= Scales(call->quantizer, call->tensors[tensor].size);
  }
  *error = {"scale", -1, tensor, slot, FloatOf(record->value), ">= 0", 0};
  return 1;
}
