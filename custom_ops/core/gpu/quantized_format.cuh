// Formats of quantized messages, and the values of codes.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_GPU_QUANTIZED_FORMAT_CUH_
#define TF_REDSYNC_CUSTOM_OPS_CORE_GPU_QUANTIZED_FORMAT_CUH_

#include <algorithm>

#include "custom_ops/core/gpu/compression_api.h"
#include "custom_ops/core/gpu/groups.cuh"
#include "custom_ops/core/gpu/vector_access.cuh"

namespace redsync {
namespace gpu {

constexpr int kMaxBits = 16;  // Maximum bits of a code.

__host__ __device__ inline bool IsBinary(const RedsyncGpuQuantizer& q) {
  return q.mode == REDSYNC_GPU_SIGN || q.mode == REDSYNC_GPU_TWO_LEVEL;
}
__host__ __device__ inline bool IsStochastic(const RedsyncGpuQuantizer& q) {
  return q.mode >= REDSYNC_GPU_STOCHASTIC;
}
inline int32_t MaxLevels(const RedsyncGpuQuantizer& q) {
  return q.mode == REDSYNC_GPU_STOCHASTIC ? 32767 : q.mode == REDSYNC_GPU_UNIFORM ? 65535 : 1;
}
// Codes are in [0, MaxCode()]. For powers of two, the largest is the one below infinity, with a
// sign.
__host__ __device__ inline int32_t MaxCode(const RedsyncGpuQuantizer& q) {
  if (q.mode == REDSYNC_GPU_NATURAL) return 2 * 254 + 1;
  return IsBinary(q) ? 1 : q.mode == REDSYNC_GPU_UNIFORM ? q.levels : 2 * q.levels;
}
inline int CodeBits(const RedsyncGpuQuantizer& q) {
  int bits = 1;
  while (MaxCode(q) >> bits != 0) ++bits;
  return bits;
}
__host__ __device__ inline int ScalesPerBucket(const RedsyncGpuQuantizer& q) {
  return q.mode == REDSYNC_GPU_TWO_LEVEL ? 2 : q.mode == REDSYNC_GPU_NATURAL ? 0 : 1;
}
inline int64_t Scales(const RedsyncGpuQuantizer& q, int64_t size) {
  return ScalesPerBucket(q) * (q.bucket == 0 ? 1 : CeilDiv(size, q.bucket));
}
inline int64_t Words(const RedsyncGpuQuantizer& q, int64_t size) {
  return CeilDiv(size * CodeBits(q), 32);
}
inline int64_t AllScales(const RedsyncGpuQuantizer& q, const RedsyncGpuDense* tensors,
                         int64_t count) {
  int64_t scales = 0;
  for (int64_t i = 0; i < count; ++i) scales += Scales(q, tensors[i].size);
  return scales;
}

// A tensor and its places in a message.
struct Coded {
  const float* in;
  float* out;
  int64_t scales_at, words_at;
  int64_t size, scales, words;
  int64_t bucket;   // Elements of a bucket, at most those of the tensor.
  uint32_t number;  // Index of the tensor.
  bool aligned;

  // Returns the bucket of an element. A 64-bit division is more expensive than all other work, so
  // it is used only for large operands.
  __device__ int64_t BucketOf(int64_t at) const {
    const bool small = static_cast<uint64_t>(at | bucket) >> 32 == 0;
    return small ? static_cast<uint32_t>(at) / static_cast<uint32_t>(bucket) : at / bucket;
  }
};

// Returns the number of elements of a block's part, which begins at `base`. Blocks count from their
// base, because a tensor may have more elements than a uint32_t can count.
__device__ inline uint32_t PartSize(int64_t size, int64_t base, uint32_t most) {
  return size - base < most ? static_cast<uint32_t>(size - base) : most;
}

struct QuantizedGroup : Group<Coded, 48> {
  RedsyncGpuQuantizer quantizer;
  int bits;
};

// Calls launch(group, blocks) on all tensors; a block has `tile` elements.
template <class G, class Launch>
void ForTensors(G group, const RedsyncGpuDense* tensors, int64_t count, int64_t tile,
                Launch launch) {
  const RedsyncGpuQuantizer& q = group.quantizer;
  int64_t scales_at = 1, words_at = 1 + AllScales(q, tensors, count);
  auto make = [&](int64_t i) {
    const RedsyncGpuDense& from = tensors[i];
    Coded to = {};
    to.in = from.in;
    to.out = from.out;
    to.scales_at = scales_at;
    to.words_at = words_at;
    to.size = from.size;
    to.scales = Scales(q, from.size);
    to.words = Words(q, from.size);
    const int64_t bucket = q.bucket == 0 ? from.size : std::min(q.bucket, from.size);
    to.bucket = std::max<int64_t>(bucket, 1);
    to.number = static_cast<uint32_t>(i);
    to.aligned = IsAligned(from.in) && IsAligned(from.out);
    scales_at += to.scales;
    words_at += to.words;
    return to;
  };
  auto tiles = [tile](const Coded& to) { return CeilDiv(to.size, tile); };
  group.bits = CodeBits(q);
  ForGroups(group, count, make, tiles, launch);
}

// The values of a bucket's codes.
struct Levels {
  float low, high;  // The values of two codes; with more codes, `high` is the scale.
  // With more codes, a code decodes to (code * 2^shift - zero) * unit.
  float unit;
  int32_t zero, shift;
};

__device__ inline Levels MakeLevels(const RedsyncGpuQuantizer& q, const float* scale) {
  if (q.mode == REDSYNC_GPU_NATURAL) return {};
  const float first = scale[0];
  if (q.mode == REDSYNC_GPU_SIGN) return {-first, first, 0, 0, 0};
  if (q.mode == REDSYNC_GPU_TWO_LEVEL) return {first, scale[1], 0, 0, 0};
  Levels levels = {0, first, first / static_cast<float>(q.levels), q.levels,
                   q.mode == REDSYNC_GPU_UNIFORM ? 1 : 0};
  // A scale of 0 becomes infinite, so that a division by it gives 0.
  if (IsStochastic(q) && !(first > 0)) levels.high = __int_as_float(0x7f800000);
  return levels;
}

__device__ inline float ValueOf(const RedsyncGpuQuantizer& q, const Levels& levels, uint32_t code) {
  if (IsBinary(q)) return code ? levels.high : levels.low;
  if (q.mode == REDSYNC_GPU_NATURAL) {
    return __int_as_float(static_cast<int32_t>(code >> 1 << 23 | code << 31));
  }
  const int32_t steps = static_cast<int32_t>(code << levels.shift) - levels.zero;
  return static_cast<float>(steps) * levels.unit;
}

}  // namespace gpu
}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_GPU_QUANTIZED_FORMAT_CUH_
