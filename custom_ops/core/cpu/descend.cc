#include "custom_ops/core/cpu/descend.h"

#include <algorithm>

namespace redsync {

int64_t FirstOutOfRange(const uint32_t* indices, int64_t entries, int64_t size) {
  uint32_t largest = 0;  // Found by vectors of indices; where a bad one is matters rarely.
  for (int64_t i = 0; i < entries; ++i) largest = std::max(largest, indices[i]);
  if (entries == 0 || largest < size) return -1;
  return std::find_if(indices, indices + entries, [size](uint32_t i) { return i >= size; }) -
         indices;
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
