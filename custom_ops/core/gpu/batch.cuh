// Parameters of the kernels of accumulate-and-select: a batch of tensors, passed by value.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_GPU_BATCH_CUH_
#define TF_REDSYNC_CUSTOM_OPS_CORE_GPU_BATCH_CUH_

#include "custom_ops/core/gpu/digits.cuh"
#include "custom_ops/core/gpu/groups.cuh"

namespace redsync {
namespace gpu {

constexpr uint32_t kChunk = 8192;        // Elements that a block accumulates.
constexpr uint32_t kGroup = 8;           // Chunks that a block of the later kernels handles.
constexpr uint32_t kKeys = 2048;         // Of the pool, that a block handles at once.
constexpr uint32_t kMaxSamples = 16384;  // Of one tensor; they stay in one block's registers.
constexpr int kMaxBatch = 24;
constexpr int kSteps = 1024;  // The threshold search ends at ratios that are multiples of 1/1024.

enum Momentum { kNoMomentum, kMomentum, kNesterov };

enum Phase { kRefine, kChoose };  // Digits of the tensor, digits of the pool.

// A tensor's state from kernel to kernel; zero at first.
struct State {
  Histogram histogram;
  uint32_t arrived;   // See SyncGrid(); of the first tensor, for all.
  uint32_t used;      // Candidates; those beyond the pool's size are not stored.
  int32_t threshold;  // The pool has all elements above it. Never negative.
  uint32_t floor;     // Elements above any lower threshold: at least so many.
  int32_t finite;
  int32_t refine;   // Whether the pool must be filled anew.
  int32_t counted;  // Whether the pool needs no count of first digits: the pass has made it.
  int32_t settled;  // Whether the threshold search has chosen.
  uint32_t reused;  // Elements above the threshold of the last ratio.
  float ratio;
  double mean, max;  // Of the magnitudes.
  Digits digits[2];
};

struct Stats {
  double sum;            // Of the magnitudes; later of the selected ones.
  int32_t max;           // Of the magnitudes' bits.
  int32_t max_absolute;  // Of the absolute values' bits; tells whether all are finite.
};

struct Tensor {
  const void* grad;  // Of float, or of bfloat16.
  const float *residual, *velocity;
  float *new_residual, *new_velocity;
  int32_t* part;  // In the message: [count, index * k, value * k] or the like.
  const float* ratio;
  float* new_ratio;
  State* state;
  uint64_t* pool;    // Keys of candidates, a run of ascending indices per chunk; any order of runs.
  Stats* stats;      // [chunks]
  Range* segments;   // [chunks], in the pool
  Tally<2>* before;  // [chunks]: elements above the cut and ties, here and then before
  uint32_t size, k;
  uint32_t need;  // Candidates that decide every question the selector asks.
  uint32_t pool_size;
  uint32_t samples;      // Elements that the prediction looks at; 0: all are candidates.
  uint32_t sample_rank;  // The sample of this rank (1 is the largest) is the predicted threshold.
  bool threshold, fixed, quantized, aligned, bfloat16;

  __host__ __device__ uint32_t chunks() const {
    return size / kChunk + (size % kChunk != 0);  // A sum with kChunk may be too large.
  }
  __host__ __device__ uint32_t groups() const { return (chunks() + kGroup - 1) / kGroup; }
  // Those that share the pool's keys; the others have none, for a group costs as much as some keys.
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

// Magnitudes above this reach a fixed threshold: the bits of floats > 0 sort like the floats.
__device__ inline int32_t FixedThreshold(float t) {
  return t > 0 ? __float_as_int(t) - 1 : 0;  // Elements must be > 0 anyway.
}

// Magnitude of an element, as a comparable int32: the bits of |v|, or of v or -v for one side.
// An element is eligible if its magnitude is > 0; denormals do not occur (nvcc -ftz=true).
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
void LaunchFinish(const Batch& batch, cudaStream_t stream);

}  // namespace gpu
}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_GPU_BATCH_CUH_
