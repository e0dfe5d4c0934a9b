// Choice of the cut: radix selection by histograms, and the threshold search.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_GPU_CUT_SEARCH_CUH_
#define TF_REDSYNC_CUSTOM_OPS_CORE_GPU_CUT_SEARCH_CUH_

#include "custom_ops/core/gpu/selection_source.cuh"

namespace redsync {
namespace gpu {

constexpr int kProbes = 10;  // Bisection steps of the threshold search.

// Runs a level of the radix selection for one of a tensor's groups; `bins` is shared memory.
template <class Source>
__device__ inline void FindDigit(const Batch& batch, const Tensor& tensor, uint32_t group,
                                 int level, uint32_t* bins) {
  Digits& digits = tensor.state->digits[Source::kPhase];
  if (!Source::IsActive(tensor) || !Source::NeedsDigits(tensor, level) || digits.done) return;
  const Source source(batch, tensor);
  const uint32_t groups = source.groups();
  if (group >= groups) return;
  const Range part = Part(source.size(), group, groups);
  NextDigit(source, part, level, groups, bins, &tensor.state->histogram, &digits);
}

// Returns the magnitude bits of the threshold mean + ratio * (max - mean).
__device__ inline int32_t ThresholdAt(const State& state, double ratio) {
  const float t = static_cast<float>(state.mean + ratio * (state.max - state.mean));
  return t > 0 ? __float_as_int(t) : 0;  // Elements must be > 0 anyway.
}

// Returns the number of thresholds, at ratios 1/kSteps, 2/kSteps, .., that are below a magnitude.
__device__ inline int StepsBelow(const int32_t* thresholds, int32_t magnitude) {
  int below = 0, not_below = kSteps;  // thresholds[1 .. below] are below.
  while (not_below - below > 1) {
    const int middle = (below + not_below) / 2;
    (thresholds[middle] < magnitude ? below : not_below) = middle;
  }
  return below;
}

// Runs the bisection on `above`, the number of candidates above the threshold of every step.
__device__ inline void Bisect(const Tensor& tensor, bool search, const uint32_t* above) {
  State& state = *tensor.state;
  const int64_t k = tensor.k;
  auto too_few = [=](int64_t n) { return 4 * n <= 3 * k; };
  auto in_band = [=](int64_t n) { return !too_few(n) && n <= k; };
  auto settle = [&](int32_t cut, float ratio) {
    state.settled = 1;
    state.digits[kChoose].cut = cut;
    if (!tensor.quantized) state.ratio = ratio;
  };
  // Below the pool's threshold only a lower bound of the count is known.
  auto count = [&](int32_t cut, uint32_t n) { return cut < state.threshold ? state.floor : n; };

  const float last = *tensor.ratio;
  if (!search && !tensor.quantized && last >= 0) {
    const int32_t cut = ThresholdAt(state, last);
    if (in_band(count(cut, state.reused))) return settle(cut, last);
  }
  int low = 0, high = kSteps;
  for (int probe = 0; probe < kProbes; ++probe) {
    const int middle = (low + high) / 2;
    const double ratio = static_cast<double>(middle) / kSteps;
    const int32_t cut = ThresholdAt(state, ratio);
    const int64_t n = count(cut, above[middle]);
    if (in_band(n)) return settle(cut, static_cast<float>(ratio));
    (too_few(n) ? high : low) = middle;
  }
}

// RedSync's threshold search. All ratios that the bisection can probe are multiples of 1/kSteps, so
// one pass over the candidates counts for all of them. The last block runs the bisection.
__device__ inline void Search(const Batch& batch, const Tensor& tensor, uint32_t group,
                              uint32_t* bins) {
  State& state = *tensor.state;
  const uint32_t groups = tensor.groups_of_pool();
  if (!tensor.threshold || tensor.takes_all() || !state.finite || group >= groups) return;

  __shared__ int32_t thresholds[kSteps];
  for (int j = threadIdx.x; j < kSteps; j += kThreads) {
    thresholds[j] = ThresholdAt(state, static_cast<double>(j) / kSteps);
  }
  ClearBins(bins);
  const int32_t last = ThresholdAt(state, *tensor.ratio);
  const Range part = Part(state.used, group, groups);
  uint32_t reused = 0;
  for (uint32_t i = threadIdx.x; i < part.count; i += kThreads) {
    const int32_t m = KeyMagnitude(tensor.pool[part.begin + i]);
    reused += m > last;
    atomicAdd(&bins[StepsBelow(thresholds, m)], 1u);
  }
  reused = BlockReduce(reused, Add());
  if (threadIdx.x == 0 && reused != 0) atomicAdd(&state.reused, reused);
  AddBins(bins, state.histogram.bins);
  if (!IsLastBlock(&state.histogram.ticket, groups)) return;

  // bins[j] = number of candidates above the threshold of step j. Each thread sums a strip of bins,
  // highest first.
  constexpr int kStrip = kSteps / kThreads;
  const int highest = kSteps - 1 - static_cast<int>(threadIdx.x) * kStrip;
  uint32_t strip_sum = 0, total;
  for (int i = 0; i < kStrip; ++i) strip_sum += state.histogram.bins[highest - i];
  uint32_t sum = BlockScan(strip_sum, &total);
  for (int i = 0; i < kStrip; ++i) bins[highest - i] = sum += state.histogram.bins[highest - i];
  __syncthreads();
  ClearBins(state.histogram.bins);
  if (threadIdx.x == 0) Bisect(tensor, *batch.search != 0, bins);
}

}  // namespace gpu
}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_GPU_CUT_SEARCH_CUH_
