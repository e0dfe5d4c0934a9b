// Prediction of a threshold, and the single pass over memory.
#include "custom_ops/core/gpu/selection_source.cuh"
#include "custom_ops/core/gpu/vector_access.cuh"

namespace redsync {
namespace gpu {
namespace {

constexpr uint32_t kLine = 16;                  // Floats of a sampled line.
constexpr uint32_t kPerWarp = kChunk / kWarps;  // Elements of a chunk that a warp accumulates.
constexpr int kRows = kPerWarp / (32 * 4);      // Vectors of four that a thread accumulates.
constexpr int kAtOnce = 4;                      // Vectors that a thread loads before it stores.
constexpr int kPerThread = kMaxSamples / kLoneThreads;  // Samples of a thread.
constexpr uint32_t kFew = 64;  // Candidates up to which a block counts digits in global memory.

// Hashes a number (the finalizer of MurmurHash3).
__device__ inline uint32_t Mixed(uint32_t x) {
  x = (x ^ x >> 16) * 0x85ebca6bu;
  x = (x ^ x >> 13) * 0xc2b2ae35u;
  return x ^ x >> 16;
}

// Predicts a threshold that probably somewhat more than `need` elements exceed: an order statistic
// of a sample of lines, one at a random place in every stride of the tensor. One block per tensor.
__global__ void __launch_bounds__(kLoneThreads) Predict(REDSYNC_PARAMETER Batch batch, int mode) {
  const Tensor& tensor = batch.tensors[blockIdx.x];
  if (tensor.samples == 0) return;  // The threshold remains 0.
  const Magnitude magnitude(batch, tensor);
  const float scale = *batch.scale;
  const uint32_t stride = tensor.size / kLine / (tensor.samples / kLine);
  int32_t sample[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const uint32_t s = i * kLoneThreads + threadIdx.x, line = s / kLine;
    sample[i] = 0;
    if (s >= tensor.samples) continue;
    const uint32_t random = Mixed(line ^ Mixed(batch.seed + blockIdx.x));
    const uint32_t at = (line * stride + random % stride) * kLine + s % kLine;
    const float v = tensor.residual[at];
    const float g = tensor.bfloat16 ? Widened(static_cast<const uint16_t*>(tensor.grad)[at])
                                    : static_cast<const float*>(tensor.grad)[at];
    float u = mode == kNoMomentum ? 0 : tensor.velocity[at];
    sample[i] =
        magnitude(mode == kNoMomentum ? Accumulated<kNoMomentum>(scale, 0, g, v, &u)
                  : mode == kMomentum ? Accumulated<kMomentum>(scale, batch.factor, g, v, &u)
                                      : Accumulated<kNesterov>(scale, batch.factor, g, v, &u));
  }

  // The first two levels of a radix selection, which are precise enough.
  __shared__ uint32_t bins[kBins];
  int32_t prefix = 0;
  uint32_t rank = tensor.sample_rank;
  for (int level = 0; level < 2; ++level) {
    const int shift = LevelShift(level), bits = LevelBits(level);
    for (int b = threadIdx.x; b < kBins; b += kLoneThreads) bins[b] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (sample[i] > 0 && static_cast<int64_t>(sample[i]) >> (shift + bits) == prefix) {
        atomicAdd(&bins[sample[i] >> shift & ((1 << bits) - 1)], 1u);
      }
    }
    __syncthreads();
    const Bin bin = FindBin(bins, rank);
    if (!bin.found) return;  // Fewer eligible samples: all eligible elements are candidates.
    prefix = prefix << bits | bin.bin;
    rank -= bin.above;
  }
  const int32_t lowest = prefix << LevelShift(1);
  if (threadIdx.x == 0) tensor.state->threshold = lowest > 0 ? lowest - 1 : 0;
}

// Evaluates the statistics of the pass: finiteness, mean, maximum, whether the prediction was
// right, and the first digit of the k-th largest magnitude.
__device__ inline void Decide(const Batch& batch, const Tensor& tensor) {
  double sum = 0;
  int32_t max = INT32_MIN, max_absolute = 0;
  for (uint32_t c = threadIdx.x; c < tensor.chunks(); c += kThreads) {
    const Stats stats = tensor.stats[c];
    sum += stats.sum;
    max = Max()(max, stats.max);
    max_absolute = Max()(max_absolute, stats.max_absolute);
  }
  sum = BlockReduce(sum, Add());
  max = BlockReduce(max, Max());
  max_absolute = BlockReduce(max_absolute, Max());
  State& state = *tensor.state;
  const float ratio = tensor.fixed ? *tensor.ratio : -1;
  const int32_t threshold = tensor.fixed ? FixedThreshold(ratio) : state.threshold;
  const uint32_t used = state.used;
  const bool finite = max_absolute < kTooLargeBits && (!tensor.fixed || ratio >= 0);
  const bool complete = tensor.fixed || threshold == 0 || used >= tensor.need;
  const bool refine = finite && (!complete || used > tensor.pool_size);
  if (!tensor.threshold) {
    if (finite && !refine && used > tensor.k) {
      EndLevel(FromPool(batch, tensor), 0, &state.histogram, &state.digits[kChoose]);
    } else {
      ClearBins(state.histogram.bins);
    }
  }
  if (threadIdx.x != 0) return;
  state.finite = finite;
  state.refine = refine;
  state.counted = !finite || (!refine && !tensor.threshold);
  state.mean = sum / tensor.size;
  // Without a positive magnitude no element is eligible, and the maximum is irrelevant.
  state.max = max > 0 ? __int_as_float(max) : 0.0f;
  state.floor = used;
  state.ratio = ratio;
  if (tensor.fixed) state.threshold = threshold;
  if (!finite) *batch.not_finite = 1;
}

// Loads a thread's vectors of the gradient from `begin` on.
template <class Number>
__device__ inline void LoadGradient(const Tensor& tensor, uint32_t begin, Vec4* g) {
  const Number* grad = static_cast<const Number*>(tensor.grad);
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    g[i] = Load(grad, begin + i * 128, tensor.size, tensor.aligned);
  }
}

// Accumulates a thread's elements and returns one bit per candidate among them.
template <int kMode>
__device__ inline uint32_t AccumulateRows(const Batch& batch, const Tensor& tensor, uint32_t begin,
                                          Stats* stats) {
  const Magnitude magnitude(batch, tensor);
  const float scale = *batch.scale;
  const int32_t threshold = tensor.fixed ? FixedThreshold(*tensor.ratio) : tensor.state->threshold;
  uint32_t candidates = 0;
  for (int row = 0; row < kRows; row += kAtOnce) {
    Vec4 g[kAtOnce], v[kAtOnce], u[kAtOnce];
    if (tensor.bfloat16) {
      LoadGradient<uint16_t>(tensor, begin + row * 128, g);
    } else {
      LoadGradient<float>(tensor, begin + row * 128, g);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const uint32_t at = begin + (row + i) * 128;
      v[i] = Load(tensor.residual, at, tensor.size, tensor.aligned);
      if (kMode != kNoMomentum) u[i] = Load(tensor.velocity, at, tensor.size, tensor.aligned);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const uint32_t at = begin + (row + i) * 128;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float value =
            Accumulated<kMode>(scale, batch.factor, g[i].at[c], v[i].at[c], &u[i].at[c]);
        const int32_t m = magnitude(value);
        v[i].at[c] = value;
        stats->max = Max()(stats->max, m);
        stats->max_absolute = Max()(stats->max_absolute, __float_as_int(value) & INT32_MAX);
        if (tensor.threshold) stats->sum += __int_as_float(m);
        // Elements beyond the end are zeros, which a non-finite scale turns into NaN.
        const bool above = m > threshold && at + c < tensor.size;
        candidates |= static_cast<uint32_t>(above) << ((row + i) * 4 + c);
      }
      Store(tensor.new_residual, at, tensor.size, tensor.aligned, v[i]);
      if (kMode != kNoMomentum && tensor.new_velocity != nullptr) {
        Store(tensor.new_velocity, at, tensor.size, tensor.aligned, u[i]);
      }
    }
  }
  return candidates;
}

// Writes the keys of a warp's candidates in the order of their indices, and counts the first digits
// of their magnitudes.
__device__ inline void Append(const Tensor& tensor, Magnitude magnitude, uint32_t candidates,
                              uint32_t begin, uint64_t* keys, uint32_t* bins) {
  for (int row = 0; row < kRows; ++row) {
    const uint32_t row_bits = candidates >> (4 * row) & 15;
    if (__ballot_sync(kAllLanes, row_bits != 0) == 0) continue;
    uint32_t before = 0, all = 0;
    for (int c = 0; c < 4; ++c) {
      const uint32_t ballot = __ballot_sync(kAllLanes, row_bits >> c & 1);
      before += RankIn(ballot);
      all += __popc(ballot);
    }
    for (int c = 0; c < 4; ++c) {
      if (!(row_bits >> c & 1)) continue;
      const uint32_t at = begin + row * 128 + c;
      const int32_t m = magnitude(tensor.new_residual[at]);
      keys[before++] = MakeKey(m, at);
      if (!tensor.threshold) atomicAdd(&bins[m >> LevelShift(0)], 1u);
    }
    keys += all;
  }
}

// Minimum number of blocks per multiprocessor, for enough loads in flight.
template <int kMode>
constexpr int kBlocksAtOnce = kMode == kNoMomentum ? 4 : 3;

// One chunk per block; its candidates become one run in the pool.
template <int kMode>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce<kMode>)
    Accumulate(REDSYNC_PARAMETER Batch batch) {
  const int item_index = FindItem(batch.first_chunk, batch.count, blockIdx.x);
  const Tensor& tensor = batch.tensors[item_index];
  const uint32_t chunk = blockIdx.x - batch.first_chunk[item_index];
  const uint32_t begin = chunk * kChunk + Warp() * kPerWarp + Lane() * 4;
  Stats stats = {0, INT32_MIN, 0};
  const uint32_t candidates = AccumulateRows<kMode>(batch, tensor, begin, &stats);

  __shared__ Stats of_warp[kWarps];
  __shared__ uint32_t counts[kWarps], place, bins[kBins];
  __shared__ bool many;
  stats.sum = WarpReduce(stats.sum, Add());
  stats.max = WarpReduce(stats.max, Max());
  stats.max_absolute = WarpReduce(stats.max_absolute, Max());
  const uint32_t count = WarpReduce(static_cast<uint32_t>(__popc(candidates)), Add());
  if (Lane() == 0) {
    of_warp[Warp()] = stats;
    counts[Warp()] = count;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    Stats all = of_warp[0];
    uint32_t total = counts[0];
    for (int w = 1; w < kWarps; ++w) {
      all.sum += of_warp[w].sum;
      all.max = Max()(all.max, of_warp[w].max);
      all.max_absolute = Max()(all.max_absolute, of_warp[w].max_absolute);
      total += counts[w];
    }
    tensor.stats[chunk] = all;
    place = total == 0 ? 0 : atomicAdd(&tensor.state->used, total);
    tensor.segments[chunk] = {place, total};
    if (place + total > tensor.pool_size) place = UINT32_MAX;  // Counted, but not stored.
    many = total > kFew && !tensor.threshold;
  }
  __syncthreads();
  if (many) ClearBins(bins);
  if (count != 0 && place != UINT32_MAX) {
    uint32_t before = 0;
    for (unsigned w = 0; w < Warp(); ++w) before += counts[w];
    Append(tensor, Magnitude(batch, tensor), candidates, begin, tensor.pool + place + before,
           many ? bins : tensor.state->histogram.bins);
  }
  if (many) AddBins(bins, tensor.state->histogram.bins);
  if (IsLastBlock(&tensor.state->histogram.ticket, tensor.chunks())) Decide(batch, tensor);
}

}  // namespace

void LaunchPredict(const Batch& batch, int mode, cudaStream_t stream) {
  REDSYNC_LAUNCH(Predict, batch.count, kLoneThreads, stream, batch, mode);
}

void LaunchAccumulate(const Batch& batch, int mode, cudaStream_t stream) {
  auto kernel = mode == kNoMomentum ? Accumulate<kNoMomentum>
                : mode == kMomentum ? Accumulate<kMomentum>
                                    : Accumulate<kNesterov>;
  REDSYNC_LAUNCH(kernel, batch.first_chunk[batch.count], kThreads, stream, batch);
}

}  // namespace gpu
}  // namespace redsync
