#include "custom_ops/core/cpu/select.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "custom_ops/core/cpu/refine.h"
#include "custom_ops/core/cpu/scratch.h"
#include "custom_ops/core/message_layout.h"

namespace redsync {
namespace {

constexpr int kProbes = 10;          // Bisection steps of the threshold search.
constexpr int64_t kGatherCost = 40;  // Cycles to read and zero a scattered element.
constexpr int64_t kElementCost = 2;  // Cycles to accumulate an element.

Magnitude MagnitudeOf(const SelectOptions& options) {
  return options.quantized ? Magnitude::OfSide(options.positive_side) : Magnitude::Absolute();
}

// Returns the magnitude above which elements reach kFixed's threshold; bits of floats > 0 sort like
// the floats.
int32_t FixedThreshold(const SelectOptions& options) {
  return options.ratio > 0 ? BitsOf(options.ratio) - 1 : 0;  // Elements must be > 0 anyway.
}

// Statistics of the accumulated tensor.
struct Summary {
  bool finite;
  double mean;  // Mean of the magnitudes, as floats.
  double max;
};

Summary Summarize(const BlockStats* stats, const Plan& plan, int64_t size) {
  int32_t max = INT32_MIN, max_absolute = 0;
  double sum = 0;
  for (int64_t b = 0; b < plan.blocks; ++b) {
    sum += stats[b].sum;
    max = std::max(max, stats[b].max);
    max_absolute = std::max(max_absolute, stats[b].max_absolute);
  }
  // Without a positive magnitude no element is eligible, and the maximum is irrelevant.
  return {max_absolute < kTooLargeBits, sum / size, max > 0 ? FloatOf(max) : 0.0};
}

// Tensors from this size on (4 MiB) do not stay in a core's caches until they are read again.
constexpr int64_t kStreamedElements = int64_t{1} << 20;

// Returns the accumulated value of one element, for the prediction.
float AccumulateOne(const PassArgs& args, int64_t i) {
  const float t = args.scale * (args.bfloat16_grad ? Widened(args.bfloat16_grad[i]) : args.grad[i]);
  switch (args.momentum) {
    case Momentum::kNone:
      return args.residual[i] + t;
    case Momentum::kPlain:
    case Momentum::kUnkept:
      return args.residual[i] + (args.factor * args.velocity[i] + t);
    case Momentum::kNesterov:
      return args.residual[i] + args.factor * (args.velocity[i] + t) + t;
    case Momentum::kAdam: {
      const float moment = args.adam.keep * args.velocity[i] + args.adam.own * (t * t);
      return args.residual[i] + t / (std::sqrt(moment) + args.adam.epsilon);
    }
  }
  return 0;
}

// Returns a threshold that probably somewhat more than `plan.need` elements exceed: an order
// statistic of a sample of cache lines, one at a random place in every stride of the tensor.
int32_t PredictThreshold(const PassArgs& args, int64_t size, const Plan& plan, int32_t* sample) {
  const int64_t lines = plan.samples / kLine;
  const int64_t stride = size / kLine / lines;
  uint32_t random = 12345;
  auto next_line = [&random, stride](int64_t i) {
    random = random * 1664525u + 1013904223u;
    return (i * stride + static_cast<int64_t>(random >> 8) % stride) * kLine;
  };
  constexpr int kAhead = 8;
  int64_t starts[kAhead];
  auto prepare = [&](int64_t i) {
    const int64_t start = starts[i % kAhead] = next_line(i);
    args.bfloat16_grad ? __builtin_prefetch(args.bfloat16_grad + start)
                       : __builtin_prefetch(args.grad + start);
    __builtin_prefetch(args.residual + start);
    if (args.momentum != Momentum::kNone) __builtin_prefetch(args.velocity + start);
  };
  for (int64_t i = 0; i < std::min<int64_t>(kAhead, lines); ++i) prepare(i);
  for (int64_t i = 0; i < lines; ++i) {
    const int64_t start = starts[i % kAhead];
    if (i + kAhead < lines) prepare(i + kAhead);
    for (int64_t j = 0; j < kLine; ++j) {
      sample[i * kLine + j] = args.magnitude(BitsOf(AccumulateOne(args, start + j)));
    }
  }
  int32_t* nth = sample + plan.sample_rank - 1;
  if (plan.sample_rank < plan.samples / 16) {  // A small heap: most samples need one comparison.
    std::partial_sort(sample, nth + 1, sample + plan.samples, std::greater<int32_t>());
  } else {
    std::nth_element(sample, nth, sample + plan.samples, std::greater<int32_t>());
  }
  // Exclude ties that the pool cannot hold; refine.cc takes the first of them.
  const int32_t limit = *nth;
  const int64_t reaching = std::count_if(sample, sample + plan.samples,
                                         [limit](int32_t magnitude) { return magnitude >= limit; });
  if (reaching * (static_cast<double>(size) / plan.samples) > plan.pool) return std::max(limit, 0);
  return std::max(limit, 1) - 1;
}

int64_t CountAbove(const Candidates& candidates, int32_t threshold) {
  // Below the candidates' own threshold only a lower bound of the count is known.
  if (threshold < candidates.threshold) return candidates.floor;
  return std::count_if(candidates.keys, candidates.keys + candidates.count,
                       [=](uint64_t key) { return KeyMagnitude(key) > threshold; });
}

// Output of the selected elements, in the order of their indices.
struct Taken {
  uint32_t* indices;
  int32_t* values;  // Null if quantized.
  int64_t count = 0;

  // Appends a candidate if it is chosen; branch-free.
  void Put(uint64_t key, bool chosen) {
    indices[count] = KeyIndex(key);
    if (values) values[count] = KeyValue(key);
    count += chosen;
  }
};

void TakeAbove(const Candidates& candidates, int32_t threshold, Taken* taken) {
  for (int64_t i = 0; i < candidates.count; ++i) {
    const uint64_t key = candidates.keys[i];
    if (KeyMagnitude(key) > threshold) taken->Put(key, true);
  }
}

// Returns the k-th largest of more than k candidates. A histogram of the magnitudes, in steps of
// 1/2048 of an octave above the candidates' threshold, leaves few candidates to sort. `work` has
// the size of the candidates.
uint64_t KthLargest(const Candidates& candidates, int64_t k, uint64_t* work) {
  constexpr int kSteps = 2048, kStepBits = 12;
  auto step_of = [&candidates](uint64_t key) {
    const int32_t excess = std::max(KeyMagnitude(key) - candidates.threshold, 0);
    return std::min(excess >> kStepBits, kSteps - 1);
  };
  uint32_t histogram[kSteps] = {};
  for (int64_t i = 0; i < candidates.count; ++i) ++histogram[step_of(candidates.keys[i])];
  int step = kSteps - 1;
  for (; histogram[step] < k; --step) k -= histogram[step];
  int64_t count = 0;
  for (int64_t i = 0; i < candidates.count; ++i) {
    work[count] = candidates.keys[i];
    count += step_of(candidates.keys[i]) == step;
  }
  std::nth_element(work, work + k - 1, work + count, std::greater<uint64_t>());
  return work[k - 1];
}

// Takes the k largest, the lower index first among equals. `work` has the size of the candidates.
void TakeTop(const Candidates& candidates, int64_t k, uint64_t* work, Taken* taken) {
  const uint64_t cutoff = candidates.count > k ? KthLargest(candidates, k, work) : 0;
  for (int64_t i = 0; i < candidates.count && taken->count < k; ++i) {
    taken->Put(candidates.keys[i], candidates.keys[i] >= cutoff);
  }
}

// Returns the magnitude bits of the threshold mean + ratio * (max - mean).
int32_t ThresholdAt(const Summary& summary, double ratio) {
  const float t = static_cast<float>(summary.mean + ratio * (summary.max - summary.mean));
  return t > 0 ? BitsOf(t) : 0;  // Elements must be > 0 anyway.
}

// RedSync's trimmed top-k: lowers a threshold between mean and maximum until k elements pass, then
// takes the exact top-k of those. The result is that of the exact selector.
void TakeTrimmed(Candidates candidates, const Summary& summary, int64_t k, uint64_t* work,
                 Taken* taken) {
  for (double ratio = 0.8; ratio > 0.1; ratio -= 0.2) {
    const int32_t threshold = ThresholdAt(summary, ratio);
    if (threshold < candidates.threshold)
      break;  // The candidates already exclude elements at this threshold, and suffice.
    if (CountAbove(candidates, threshold) < k) continue;
    uint64_t* end = std::remove_if(candidates.keys, candidates.keys + candidates.count,
                                   [=](uint64_t key) { return KeyMagnitude(key) <= threshold; });
    candidates.count = end - candidates.keys;
    break;
  }
  TakeTop(candidates, k, work, taken);
}

// RedSync's threshold binary search with reuse of the last ratio; takes 3/4 k to k elements.
void TakeByThreshold(const Candidates& candidates, const Summary& summary,
                     const SelectOptions& options, uint64_t* work, Taken* taken, float* new_ratio) {
  const int64_t k = options.k;
  auto too_few = [=](int64_t n) { return 4 * n <= 3 * k; };
  auto in_band = [=](int64_t n) { return !too_few(n) && n <= k; };
  if (!options.search && !options.quantized && options.ratio >= 0) {
    const int32_t threshold = ThresholdAt(summary, options.ratio);
    if (in_band(CountAbove(candidates, threshold))) {
      *new_ratio = options.ratio;
      return TakeAbove(candidates, threshold, taken);
    }
  }
  double low = 0, high = 1;
  for (int probe = 0; probe < kProbes; ++probe) {
    const double middle = (low + high) / 2;  // A dyadic fraction, exact as a float.
    const int32_t threshold = ThresholdAt(summary, middle);
    const int64_t count = CountAbove(candidates, threshold);
    if (in_band(count)) {
      if (!options.quantized) *new_ratio = static_cast<float>(middle);
      return TakeAbove(candidates, threshold, taken);
    }
    (too_few(count) ? high : low) = middle;
  }
  TakeTop(candidates, k, work, taken);
}

// Takes all elements with a magnitude above the threshold; the capacity is the tensor's size.
void TakeAll(const float* values, int64_t size, Magnitude magnitude, int32_t threshold,
             const Plan& plan, int64_t* counts, const ParallelFor& parallel_for, Taken* taken) {
  auto for_blocks = [&](const std::function<void(int64_t, int64_t, int64_t)>& body) {
    parallel_for(plan.blocks, kBlock, [&](int64_t first, int64_t last) {
      for (int64_t b = first; b < last; ++b) body(b, b * kBlock, std::min(size, (b + 1) * kBlock));
    });
  };
  counts[0] = 0;
  for_blocks([&](int64_t b, int64_t begin, int64_t end) {
    int64_t count = 0;
    for (int64_t i = begin; i < end; ++i) count += magnitude(BitsOf(values[i])) > threshold;
    counts[b + 1] = count;
  });
  for (int64_t b = 0; b < plan.blocks; ++b) counts[b + 1] += counts[b];
  for_blocks([&](int64_t b, int64_t begin, int64_t end) {
    int64_t out = counts[b];
    for (int64_t i = begin; i < end; ++i) {
      const int32_t bits = BitsOf(values[i]);
      if (magnitude(bits) <= threshold) continue;
      taken->indices[out] = static_cast<uint32_t>(i);
      if (taken->values) taken->values[out] = bits;
      ++out;
    }
  });
  taken->count = counts[plan.blocks];
}

// Returns the candidates of the accumulate pass if the prediction was right, else those of
// Refine().
Candidates Gather(const float* values, const SelectOptions& options, int32_t threshold,
                  const Plan& plan, const Scratch& scratch, CandidatePool* pool,
                  const ParallelFor& parallel_for) {
  const bool complete =
      threshold == 0 || options.selector == Selector::kFixed || pool->used() >= plan.need;
  if (!complete || pool->overflowed()) {
    return Refine(values, options.size, MagnitudeOf(options), options.k, threshold, plan, scratch,
                  pool, parallel_for);
  }
  pool->CopyInOrder(scratch.ordered_keys);
  return {scratch.ordered_keys, pool->used(), threshold, pool->used()};
}

// Returns the mean of the selected elements, summed in the order of the indices.
float MeanOf(const Taken& taken, const float* values) {
  double sum = 0;
  for (int64_t i = 0; i < taken.count; ++i) sum += values[taken.indices[i]];
  return taken.count > 0 ? static_cast<float>(sum / taken.count) : 0.0f;
}

// Zeroes the selected elements in the outputs.
void Clear(const SelectOptions& options, const SelectBuffers& buffers, int64_t count,
           const ParallelFor& parallel_for) {
  float* residual = options.clear_residual ? buffers.new_residual : nullptr;
  float* velocity = options.masking ? buffers.new_velocity : nullptr;
  for (float* memory : {residual, velocity}) {
    if (memory == nullptr) continue;
    parallel_for(count, kGatherCost, [&](int64_t first, int64_t last) {
      constexpr int64_t kAhead = 16;  // Elements are in different cache lines and mostly pages.
      for (int64_t i = first; i < last; ++i) {
        if (i + kAhead < last) __builtin_prefetch(memory + buffers.indices[i + kAhead], 1);
        memory[buffers.indices[i]] = 0;
      }
    });
  }
}

PassArgs MakeArgs(const SelectOptions& options, const SelectBuffers& buffers) {
  PassArgs args;
  args.momentum = options.momentum;
  args.bypass_caches = options.size >= kStreamedElements;
  const bool sums =
      options.selector == Selector::kTrimmed || options.selector == Selector::kThreshold;
  args.need_sum = sums && options.k < options.size;
  args.factor = options.factor;
  args.adam = options.adam;
  args.scale = options.scale;
  args.magnitude = MagnitudeOf(options);
  args.grad = buffers.grad;
  args.bfloat16_grad = buffers.bfloat16_grad;
  args.residual = buffers.residual;
  args.velocity = buffers.velocity;
  args.new_residual = buffers.new_residual;
  args.new_velocity = buffers.new_velocity;
  return args;
}

void Take(const SelectOptions& options, const SelectBuffers& buffers, const Summary& summary,
          int32_t threshold, const Plan& plan, const Scratch& scratch, CandidatePool* pool,
          const ParallelFor& parallel_for, Taken* taken, float* new_ratio) {
  if (options.k >= options.size) {
    const int32_t above = options.selector == Selector::kFixed ? FixedThreshold(options) : 0;
    return TakeAll(buffers.new_residual, options.size, MagnitudeOf(options), above, plan,
                   scratch.counts, parallel_for, taken);
  }
  const Candidates candidates =
      Gather(buffers.new_residual, options, threshold, plan, scratch, pool, parallel_for);
  switch (options.selector) {
    case Selector::kExact:
    case Selector::kFixed:
      return TakeTop(candidates, options.k, scratch.keys, taken);
    case Selector::kTrimmed:
      return TakeTrimmed(candidates, summary, options.k, scratch.keys, taken);
    case Selector::kThreshold:
      return TakeByThreshold(candidates, summary, options, scratch.keys, taken, new_ratio);
  }
}

}  // namespace

int64_t SelectScratchBytes(int64_t size, int64_t k, Selector selector) {
  return Scratch(Plan(size, k, selector)).bytes();
}

Status AccumulateAndSelect(const SelectOptions& options, const SelectBuffers& buffers, void* memory,
                           int64_t scratch_bytes, const ParallelFor& parallel_for,
                           SelectResult* result) {
  const int64_t size = options.size;
  *result = {};
  if (size < 0 || size > kMaxElements || options.k > size || options.k > INT32_MAX ||
      options.k < std::min<int64_t>(size, 1)) {
    return Status::kInvalidArgument;
  }
  const bool fixed = options.selector == Selector::kFixed;
  if (fixed) {
    if (options.ratio < 0) return Status::kInvalidArgument;
    result->ratio = options.ratio;
    result->finite = !std::isnan(options.ratio);
  }
  if (size == 0) return Status::kOk;
  const Plan plan(size, options.k, options.selector);
  const Scratch scratch(plan, memory);
  if (scratch_bytes < scratch.bytes()) return Status::kScratchTooSmall;

  ScopedFlushDenormals flush;
  PassArgs args = MakeArgs(options, buffers);
  args.threshold = plan.pool == 0      ? INT32_MAX
                   : fixed             ? FixedThreshold(options)
                   : plan.samples == 0 ? 0
                                       : PredictThreshold(args, size, plan, scratch.sample);
  CandidatePool pool(scratch.keys, plan.pool, scratch.segments);
  parallel_for(plan.blocks, kElementCost * kBlock, [&](int64_t first, int64_t last) {
    ScopedFlushDenormals flush_here;
    Passes().accumulate(args, first * kBlock, std::min(size, last * kBlock), scratch.stats + first,
                        &pool);
  });
  const Summary summary = Summarize(scratch.stats, plan, size);
  result->finite = result->finite && summary.finite;
  if (!result->finite) return Status::kOk;
  Taken taken{buffers.indices, options.quantized ? nullptr : buffers.values};
  Take(options, buffers, summary, args.threshold, plan, scratch, &pool, parallel_for, &taken,
       &result->ratio);
  result->count = taken.count;
  if (options.quantized) result->mean = MeanOf(taken, buffers.new_residual);
  Clear(options, buffers, taken.count, parallel_for);
  return Status::kOk;
}

}  // namespace redsync
