// Plain gradient descent along a sum in coordinate form.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_CPU_DESCEND_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_CPU_DESCEND_H_

#include <cstdint>

#include "custom_ops/core/cpu/common.h"

namespace redsync {

// Position of the first entry of indices[0 .. entries) that is not in [0, size), or -1.
int64_t FirstOutOfRange(const uint32_t* indices, int64_t entries, int64_t size);

// variable[indices[i]] -= learning_rate * values[i] for i = 0, 1, ... All indices are in range.
void Descend(const uint32_t* indices, const float* values, int64_t entries, float learning_rate,
             float* variable);

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_CPU_DESCEND_H_
