#include "custom_ops/core/cpu/refine.h"

#include <algorithm>

namespace redsync {
namespace {

// A magnitude has 31 bits; every level of the search determines some of them, from the top.
struct Level {
  int shift;
  int bits;
};
constexpr Level kLevels[] = {{20, 11}, {10, 10}, {0, 10}};

// Counts the eligible magnitudes whose bits above this level equal `prefix`, in one histogram per
// shard, and sums the histograms into the first one.
void CountBins(const float* values, int64_t size, Magnitude magnitude, Level level, int32_t prefix,
               const Plan& plan, int64_t* histograms, const ParallelFor& parallel_for) {
  const int32_t mask = (1 << level.bits) - 1;
  auto count_shard = [&](int64_t shard) {
    int64_t* bins = histograms + shard * kBins;
    std::fill(bins, bins + kBins, 0);
    const int64_t begin = shard * plan.blocks / plan.shards * kBlock;
    const int64_t end = std::min(size, (shard + 1) * plan.blocks / plan.shards * kBlock);
    for (int64_t i = begin; i < end; ++i) {
      const int32_t m = magnitude(BitsOf(values[i]));
      if (m > 0 && int64_t{m} >> (level.shift + level.bits) == prefix) {
        ++bins[m >> level.shift & mask];
      }
    }
  };
  parallel_for(plan.shards, 2 * size / plan.shards, [&](int64_t first, int64_t last) {
    for (int64_t shard = first; shard < last; ++shard) count_shard(shard);
  });
  for (int64_t shard = 1; shard < plan.shards; ++shard) {
    for (int b = 0; b < kBins; ++b) histograms[b] += histograms[shard * kBins + b];
  }
}

struct RefinedThreshold {
  int32_t threshold = 0;
  int64_t above = 0;  // Elements above the threshold, which fit the pool.
  int64_t floor = 0;  // Elements above threshold - 1.
};

RefinedThreshold FindThreshold(const float* values, int64_t size, Magnitude magnitude,
                               const Plan& plan, const Scratch& scratch,
                               const ParallelFor& parallel_for) {
  int32_t prefix = 0;  // Bits of the threshold found so far.
  int64_t above = 0;   // Elements above all elements with this prefix.
  int64_t total = 0;
  for (const Level& level : kLevels) {
    CountBins(values, size, magnitude, level, prefix, plan, scratch.histograms, parallel_for);
    int32_t bin = (1 << level.bits) - 1;
    total = above + scratch.histograms[bin];
    while (bin > 0 && total < plan.need) total += scratch.histograms[--bin];
    if (bin == 0 && total < plan.need && prefix == 0) {
      return {0, total, total};  // Fewer eligible elements than needed: take all.
    }
    above = total - scratch.histograms[bin];
    prefix = prefix << level.bits | bin;
    if (total <= plan.pool) {
      return {std::max((prefix << level.shift) - 1, 0), total, total};
    }
  }
  return {prefix, above, total};  // More ties than the pool holds.
}

// Appends keys of the first `count` elements of magnitude `tie` and restores the order. Returns
// whether there are at least `count`.
bool AddTies(const float* values, int64_t size, Magnitude magnitude, int32_t tie, int64_t count,
             Candidates* candidates) {
  uint64_t* end = candidates->keys + candidates->count;
  for (int64_t i = 0; i < size && count > 0; ++i) {
    const int32_t bits = BitsOf(values[i]);
    if (magnitude(bits) != tie) continue;
    *end++ = MakeKey(tie, i, bits < 0);
    --count;
  }
  if (candidates->count > 0) {  // Otherwise all are ties and in order already.
    std::sort(candidates->keys, end,
              [](uint64_t a, uint64_t b) { return KeyIndex(a) < KeyIndex(b); });
  }
  candidates->count = end - candidates->keys;
  return count == 0;
}

}  // namespace

Candidates Refine(const float* values, int64_t size, Magnitude magnitude, int64_t k,
                  int32_t predicted, const Plan& plan, const Scratch& scratch, CandidatePool* pool,
                  const ParallelFor& parallel_for) {
  auto collect = [&](int32_t threshold) {
    pool->Clear();
    parallel_for(plan.blocks, kBlock, [&](int64_t first, int64_t last) {
      Passes().scan(values, magnitude, threshold, first * kBlock, std::min(size, last * kBlock),
                    pool);
    });
  };
  // The usual cause of an overflow is a very frequent magnitude. If it is the smallest one above
  // the threshold, raise the threshold to it.
  if (pool->overflowed()) collect(++predicted);
  if (!pool->overflowed()) {
    pool->CopyInOrder(scratch.ordered_keys);
    Candidates candidates = {scratch.ordered_keys, pool->used(), predicted, 0};
    const int64_t missing = plan.need - candidates.count;
    if (missing <= 0 || AddTies(values, size, magnitude, predicted, missing, &candidates)) {
      candidates.floor = candidates.count;
      return candidates;
    }
  }
  const RefinedThreshold refined =
      FindThreshold(values, size, magnitude, plan, scratch, parallel_for);
  collect(refined.threshold);
  pool->CopyInOrder(scratch.ordered_keys);
  Candidates candidates = {scratch.ordered_keys, pool->used(), refined.threshold, refined.floor};
  if (refined.floor > plan.pool && refined.above < k) {
    AddTies(values, size, magnitude, refined.threshold, k - refined.above, &candidates);
  }
  return candidates;
}

}  // namespace redsync
