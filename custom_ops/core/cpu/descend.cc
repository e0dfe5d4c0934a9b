#include "custom_ops/core/cpu/descend.h"

namespace redsync {

int64_t FirstOutOfRange(const uint32_t* indices, int64_t entries, int64_t size) {
  for (int64_t i = 0; i < entries; ++i) {
    if (indices[i] >= size) return i;
  }
  return -1;
}

void Descend(const uint32_t* indices, const float* values, int64_t entries, float learning_rate,
             float* variable) {
  // Entries are far apart, so each is a miss in the caches: ask for one well before its turn.
  constexpr int64_t kAhead = 32;
  const ScopedFlushDenormals flush;
  for (int64_t i = 0; i < entries; ++i) {
    if (i + kAhead < entries) __builtin_prefetch(variable + indices[i + kAhead], 1);
    variable[indices[i]] -= learning_rate * values[i];
  }
}

}  // namespace redsync
