// Plain gradient descent along a sum given as positions and values.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_CPU_DESCEND_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_CPU_DESCEND_H_

#include <cstdint>

#include "custom_ops/core/cpu/common.h"

namespace redsync {

// Coordinates of a sum. Positions may repeat and have any order. Long ascending runs, such as the
// concatenated messages of the workers, are fastest.
struct Coordinates {
  const uint32_t* indices;
  const float* values;
  int64_t entries;
};

// variable[indices[i]] -= learning_rate * values[i] for i = 0, 1, .., as if sequentially. If an
// index is not in [0, size), the variable is unchanged. Returns the first such i, else -1.
int64_t Descend(const Coordinates& along, float learning_rate, int64_t size,
                const ParallelFor& parallel_for, float* variable);

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_CPU_DESCEND_H_
