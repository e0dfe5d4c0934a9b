// The way out when the predicted threshold was wrong: finds candidates by histograms.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_CPU_REFINE_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_CPU_REFINE_H_

#include <cstdint>

#include "custom_ops/core/cpu/common.h"
#include "custom_ops/core/cpu/pass.h"
#include "custom_ops/core/cpu/scratch.h"

namespace redsync {

// The largest elements, in the order of their indices. Unless `threshold` is 0 there are more
// elements than these; any threshold below `threshold` has at least `floor` elements above it.
struct Candidates {
  uint64_t* keys;
  int64_t count;
  int32_t threshold;
  int64_t floor;
};

// Finds at least `plan.need` candidates, or all eligible elements if there are fewer, by a radix
// search for the threshold, whatever the distribution. Among more ties at the threshold than the
// pool holds, those of the lowest indices are taken, so that there are at least `k` candidates.
// `pool` is as the pass left it with the threshold `predicted`, which is tried as a tie first.
Candidates Refine(const float* values, int64_t size, Magnitude magnitude, int64_t k,
                  int32_t predicted, const Plan& plan, const Scratch& scratch, CandidatePool* pool,
                  const ParallelFor& parallel_for);

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_CPU_REFINE_H_
