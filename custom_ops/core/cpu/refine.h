// Fallback for a wrong predicted threshold: finds candidates by histograms.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_CPU_REFINE_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_CPU_REFINE_H_

#include <cstdint>

#include "custom_ops/core/cpu/common.h"
#include "custom_ops/core/cpu/pass.h"
#include "custom_ops/core/cpu/scratch.h"

namespace redsync {

// The largest elements, in the order of their indices. If `threshold` is not 0, there are more
// elements than these, and at least `floor` elements are above any lower threshold.
struct Candidates {
  uint64_t* keys;
  int64_t count;
  int32_t threshold;
  int64_t floor;
};

// Finds at least `plan.need` candidates, or all eligible elements if there are fewer, by a radix
// search for the threshold, for any distribution. If the pool cannot hold all ties at the
// threshold, those of the lowest indices are taken, so that there are at least `k` candidates.
// `pool` has the result of the pass with the threshold `predicted`; a tie at the next magnitude is
// tried first.
Candidates Refine(const float* values, int64_t size, Magnitude magnitude, int64_t k,
                  int32_t predicted, const Plan& plan, const Scratch& scratch, CandidatePool* pool,
                  const ParallelFor& parallel_for);

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_CPU_REFINE_H_
