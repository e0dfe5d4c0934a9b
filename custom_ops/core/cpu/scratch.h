// Division of the scratch memory of AccumulateAndSelect.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_CPU_SCRATCH_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_CPU_SCRATCH_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "custom_ops/core/cpu/candidates.h"
#include "custom_ops/core/cpu/common.h"
#include "custom_ops/core/cpu/pass.h"
#include "custom_ops/core/cpu/select.h"

namespace redsync {

constexpr int kBins = 2048;       // Bins of a histogram of magnitudes.
constexpr int kMaxShards = 16;    // Ranges of blocks with a histogram each.
constexpr int64_t kSmall = 4096;  // Tensors up to this size need no prediction.
constexpr int64_t kLine = 16;     // Floats in a cache line; samples are whole lines.

// Sizes of the problem and of the parts of the scratch memory.
struct Plan {
  int64_t blocks;
  int64_t shards;
  int64_t need;         // Number of candidates that the selector needs.
  int64_t samples;      // Elements that the prediction samples; 0 if all elements are candidates.
  int64_t sample_rank;  // The sample of this rank (1 is the largest) is the predicted threshold.
  int64_t pool;         // Capacity of the pool of candidates.

  Plan(int64_t size, int64_t k, Selector selector) {
    blocks = CeilDiv(size, kBlock);
    shards = std::min<int64_t>(blocks, kMaxShards);
    // k + 1 for the search: any threshold below those of k + 1 candidates selects too many.
    need = selector == Selector::kThreshold ? k + 1 : k;
    if (k >= size) {  // Everything is selected, so no candidates are needed.
      samples = sample_rank = pool = 0;
    } else if (selector == Selector::kFixed) {  // The threshold is known.
      samples = sample_rank = 0;
      pool = std::min(size, need + need / 2 + kSmall);
    } else if (size <= kSmall || need >= size) {
      samples = sample_rank = 0;
      pool = size;
    } else {
      Predict(size);
    }
  }

 private:
  void Predict(int64_t size) {
    const double n = static_cast<double>(size), want = static_cast<double>(need);
    // About 24 samples above the threshold, so that a margin of four sigmas stays small. More
    // samples if many elements are selected, because a surplus candidate costs as much as a sample.
    const double hits = std::clamp(want / 1000, 24.0, 400.0);
    samples = std::clamp<int64_t>(hits * n / want, 1024, std::max<int64_t>(size / 32, 1024));
    samples = CeilDiv(samples, kLine) * kLine;
    const double expected = samples * (want / n);
    sample_rank = std::min<int64_t>(expected + 4 * std::sqrt(expected) + 2, samples);
    pool = std::min<int64_t>(size, 3 * need + 4096);
  }
};

class Scratch {
 public:
  explicit Scratch(const Plan& plan) { AssignParts(plan, nullptr); }
  Scratch(const Plan& plan, void* memory) { AssignParts(plan, static_cast<char*>(memory)); }

  int64_t bytes() const { return bytes_; }

  BlockStats* stats;
  int64_t* counts;         // [blocks + 1]
  uint64_t* keys;          // [pool] unordered
  uint64_t* ordered_keys;  // [pool]
  CandidatePool::Segment* segments;
  int32_t* sample;      // [samples] magnitudes
  int64_t* histograms;  // [shards, kBins]

 private:
  void AssignParts(const Plan& plan, char* memory) {
    bytes_ = 0;
    auto take = [this, memory](auto** pointer, int64_t count) {
      *pointer =
          reinterpret_cast<std::decay_t<decltype(*pointer)>>(memory ? memory + bytes_ : nullptr);
      bytes_ += CeilDiv(count * static_cast<int64_t>(sizeof(**pointer)), 64) * 64;
    };
    take(&stats, plan.blocks);
    take(&counts, plan.blocks + 1);
    take(&keys, plan.pool);
    take(&ordered_keys, plan.pool);
    take(&segments, CandidatePool::MaxSegments(plan.pool, plan.blocks));
    take(&sample, plan.samples);
    take(&histograms, plan.shards * kBins);
  }

  int64_t bytes_ = 0;
};

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_CPU_SCRATCH_H_
