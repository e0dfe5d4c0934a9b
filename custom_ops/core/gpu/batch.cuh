// Parameters of the kernels of accumulate-and-select: a batch of tensors, passed by value.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_GPU_BATCH_CUH_
#define TF_REDSYNC_CUSTOM_OPS_CORE_GPU_BATCH_CUH_

#include "custom_ops/core/gpu/digits.cuh"
#include "custom_ops/core/gpu/groups.cuh"

namespace redsync {
namespace gpu {

constexpr uint32_t kChunk = 8192;        // Elements that a block accumulates.
constexpr uint32_t kGroup = 8;           // Chunks that a block of the later kernels handles.
constexpr uint32_t kKeys = 2048;         // Keys of the pool that a block handles at once.
constexpr uint32_t kMaxSamples = 16384;  // Samples of a tensor, which stay in a block's registers.
constexpr int kMaxBatch = 24;
constexpr int kSteps = 1024;  // The threshold search probes ratios that are multiples of 1/1024.

enum Momentum { kNoMomentum, kMomentum, kNesterov };

enum Phase { kRefine, kChoose };  // Selection from the tensor, and from the pool.

// A tensor's state between kernels; initially zero.
struct State {
  Histogram histogram;
  uint32_t arrived;   // See SyncGrid(); only the first tensor's is used.
  uint32_t used;      // Number of candidates; those beyond the pool's size are not stored.
  int32_t threshold;  // The pool has all elements above it; >= 0.
  uint32_t floor;     // Minimum number of elements above any lower threshold.
  int32_t finite;
  int32_t refine;   // Whether the pool must be filled again.
  int32_t counted;  // Whether the pass has already counted the first digits of the pool.
  int32_t settled;  // Whether the threshold search has set the cut.
  uint32_t reused;  // Elements above the threshold of the last ratio.
  float ratio;
  double mean, max;  // Mean and maximum of the magnitudes.
  Digits digits[2];
};

struct Stats {
  double sum;            // Sum of the magnitudes; later of the selected elements.
  int32_t max;           // Maximum of the magnitudes' bits.
  int32_t max_absolute;  // Maximum of the absolute values' bits, to check that all are finite.
};

struct Tensor {
  const void* grad;  // float or bfloat16.
  const float *residual, *velocity;
  float *new_residual, *new_velocity;
  int32_t* part;  // Part of the message, [count, index * k, value * k] or [count, mean, index * k].
  const float* ratio;
  float* new_ratio;
  State* state;
  uint64_t* pool;    // Keys of candidates: a run of ascending indices per chunk, runs in any order.
  Stats* stats;      // [chunks]
  Range* segments;   // [chunks]: runs in the pool.
  Tally<2>* before;  // [chunks]: elements above the cut and ties; in the chunk, later before it.
  uint32_t size, k;
  uint32_t need;  // Number of candidates that the selector needs.
  uint32_t pool_size;
  uint32_t samples;      // Elements that the prediction samples; 0 if all elements are candidates.
  uint32_t sample_rank;  // The sample of this rank (1 is the largest) is the predicted threshold.
  bool threshold, fixed, quantized, aligned, bfloat16;

  __host__ __device__ uint32_t chunks() const {
    return size / kChunk + (size % kChunk != 0);  // size + kChunk may overflow.
  }
  __host__ __device__ uint32_t groups() const { return (chunks() + kGroup - 1) / kGroup; }
  // Number of groups that share the pool's keys. Few keys use few groups, since a group has a cost.
  __device__ uint32_t groups_of_pool() const {
    const uint32_t enough = state->used / kKeys + 1, all = groups();
    return enough < all ? enough : all;
  }
  __device__ bool takes_all() const { return k >= size; }
};

struct Batch {
  Tensor tensors[kMaxBatch];
  uint32_t first_chunk[kMaxBatch + 1], first_group[kMaxBatch + 1];
  int count;
  uint32_t seed;
  float factor;
  bool masking;
  const float* scale;
  const int32_t* side;
  const uint8_t* search;
  int32_t* not_finite;
};
static_assert(sizeof(Batch) <= 4080, "parameters of a kernel, with one more for some");

// Returns the magnitude above which elements reach a fixed threshold; bits of floats > 0 sort like
// the floats.
__device__ inline int32_t FixedThreshold(float t) {
  return t > 0 ? __float_as_int(t) - 1 : 0;  // Elements must be > 0 anyway.
}

// Magnitude of an element, as a comparable int32: the bits of |v|, or of v or -v if one sign is
// selected. An element is eligible if its magnitude is > 0; denormals do not occur (nvcc
// -ftz=true).
struct Magnitude {
  int32_t keep, flip;
  __device__ Magnitude(const Batch& batch, const Tensor& tensor)
      : keep(tensor.quantized ? -1 : INT32_MAX),
        flip(tensor.quantized && *batch.side < 0 ? INT32_MIN : 0) {}
  __device__ int32_t operator()(float v) const { return (__float_as_int(v) & keep) ^ flip; }
};

template <int kMode>
__device__ inline float Accumulated(float scale, float factor, float g, float v, float* u) {
  const float t = scale * g;
  if (kMode == kNoMomentum) return v + t;
  if (kMode == kMomentum) {
    *u = factor * *u + t;
    return v + *u;
  }
  *u = factor * (*u + t);
  return (v + *u) + t;
}

// The kernels, in the order of their launches.
void LaunchPredict(const Batch& batch, int mode, cudaStream_t stream);
void LaunchAccumulate(const Batch& batch, int mode, cudaStream_t stream);
void LaunchSelectCandidates(const Batch& batch, cudaStream_t stream);

}  // namespace gpu
}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_GPU_BATCH_CUH_
