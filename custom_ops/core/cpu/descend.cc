#include "custom_ops/core/cpu/descend.h"

#include <algorithm>
#include <vector>

namespace redsync {
namespace {

constexpr int64_t kSpan = 65536;   // Elements that stay in a thread's cache for all runs.
constexpr size_t kMaxRuns = 1024;  // With more runs, entries are applied one by one.
constexpr int64_t kEntryCost = 8;  // Cycles.

// Entries [begin, end) whose indices do not descend.
struct Run {
  int64_t begin, end;
};

// Divides the entries into runs; stops after more than kMaxRuns.
std::vector<Run> FindRuns(const uint32_t* indices, int64_t entries) {
  constexpr int64_t kTile = 4096;  // Entries that a vectorized loop checks for descents first.
  std::vector<Run> runs;
  int64_t begin = 0;
  for (int64_t tile = 1; tile < entries && runs.size() <= kMaxRuns; tile += kTile) {
    const int64_t end = std::min(tile + kTile, entries);
    uint32_t descends = 0;
    for (int64_t i = tile; i < end; ++i) descends |= uint32_t{indices[i] < indices[i - 1]};
    for (int64_t i = tile; i < end && descends != 0; ++i) {
      if (indices[i] >= indices[i - 1]) continue;
      runs.push_back({begin, i});
      begin = i;
    }
  }
  if (begin < entries) runs.push_back({begin, entries});
  return runs;
}

// Applies entries from `at` on while their indices are below `end`; returns the next entry.
int64_t Apply(const Coordinates& along, int64_t at, const Run& run, int64_t end, float rate,
              float* variable) {
  // Entries are far apart, so each is a cache miss: prefetch.
  constexpr int64_t kAhead = 32;
  for (; at < run.end && along.indices[at] < end; ++at) {
    if (at + kAhead < run.end) __builtin_prefetch(variable + along.indices[at + kAhead], 1);
    variable[along.indices[at]] -= rate * along.values[at];
  }
  return at;
}

}  // namespace

int64_t Descend(const Coordinates& along, float learning_rate, int64_t size,
                const ParallelFor& parallel_for, float* variable) {
  const uint32_t* indices = along.indices;
  const std::vector<Run> runs = FindRuns(indices, along.entries);
  const bool in_range = std::all_of(runs.begin(), runs.end(), [&](const Run& run) {
    return indices[run.end - 1] < size;  // The run's largest index.
  });
  if (!in_range || runs.size() > kMaxRuns) {
    const uint32_t* bad = std::find_if(indices, indices + along.entries,
                                       [size](uint32_t index) { return index >= size; });
    if (bad != indices + along.entries) return bad - indices;
  }
  if (runs.size() > kMaxRuns) {
    const ScopedFlushDenormals flush;
    for (const Run& run : runs) Apply(along, run.begin, run, size, learning_rate, variable);
    return -1;
  }
  const int64_t spans = CeilDiv(size, kSpan);
  const int64_t cost = kEntryCost * CeilDiv(along.entries, std::max<int64_t>(spans, 1));
  parallel_for(spans, cost, [&](int64_t first, int64_t last) {
    const ScopedFlushDenormals flush;
    std::vector<int64_t> next;  // Next entry of each run.
    for (const Run& run : runs) {
      next.push_back(std::lower_bound(indices + run.begin, indices + run.end, first * kSpan) -
                     indices);
    }
    for (int64_t s = first; s < last; ++s) {
      const int64_t end = std::min(size, (s + 1) * kSpan);
      for (size_t r = 0; r < runs.size(); ++r) {
        next[r] = Apply(along, next[r], runs[r], end, learning_rate, variable);
      }
    }
  });
  return -1;
}

}  // namespace redsync
