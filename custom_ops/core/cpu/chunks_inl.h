// Top-k of a chunk, in loops that the compiler vectorizes. No include guard: chunks.cc includes
// this once for every instruction set.

// Writes the largest magnitude of every run of kRun elements; the last run may be shorter.
template <int64_t kRun>
int64_t MaximaOfRuns(const float* chunk, int64_t size, int32_t* maxima) {
  const int64_t whole = size / kRun;
  for (int64_t run = 0; run < whole; ++run) {
    int32_t max = 0;
    for (int64_t i = 0; i < kRun; ++i) max = std::max(max, MagnitudeBits(chunk[run * kRun + i]));
    maxima[run] = max;
  }
  if (whole * kRun == size) return whole;
  maxima[whole] = 0;
  for (int64_t i = whole * kRun; i < size; ++i) {
    maxima[whole] = std::max(maxima[whole], MagnitudeBits(chunk[i]));
  }
  return whole + 1;
}

// Returns a threshold that at least `k` of the magnitudes reach, and at most `enough` of them
// unless there are ties. It bisects the range between the smallest and the largest magnitude.
// *reaching is the number of magnitudes that reach the threshold. 1 <= k <= count.
int32_t Threshold(const int32_t* magnitudes, int64_t count, int64_t k, int64_t enough,
                  int64_t* reaching) {
  int32_t smallest = magnitudes[0], largest = magnitudes[0];
  for (int64_t i = 1; i < count; ++i) {
    smallest = std::min(smallest, magnitudes[i]);
    largest = std::max(largest, magnitudes[i]);
  }
  int64_t low = smallest, high = int64_t{largest} + 1;  // At least k reach `low`.
  *reaching = count;
  while (high - low > 1 && *reaching > enough) {
    const int32_t middle = static_cast<int32_t>(low + (high - low) / 2);
    int32_t found = 0;
    for (int64_t i = 0; i < count; ++i) found += magnitudes[i] >= middle;
    if (found < k) {
      high = middle;
    } else {
      low = middle;
      *reaching = found;
    }
  }
  return static_cast<int32_t>(low);
}

// Writes positions and magnitudes of the elements that reach `threshold`, in the order of the
// positions, and returns their number. `runs` has the maxima of the runs, and is overwritten.
template <int64_t kRun>
int64_t Collect(const float* chunk, int64_t size, int32_t threshold, int32_t* runs, int64_t count,
                int32_t* at, int32_t* magnitudes) {
  int64_t chosen = 0, found = 0;
  for (int64_t run = 0; run < count; ++run) {  // Branch-free: the CPU could not predict branches.
    const bool reaches = runs[run] >= threshold;
    runs[chosen] = static_cast<int32_t>(run);
    chosen += reaches;
  }
  for (int64_t c = 0; c < chosen; ++c) {
    const int64_t first = runs[c] * kRun, last = std::min(first + kRun, size);
    for (int64_t i = first; i < last; ++i) {
      const int32_t magnitude = MagnitudeBits(chunk[i]);
      at[found] = static_cast<int32_t>(i);
      magnitudes[found] = magnitude;
      found += magnitude >= threshold;
    }
  }
  return found;
}

// Selects the exact top-k from the elements that reach the `k`-th largest maximum of a run. These
// are at least k elements, and few more if there are several runs per selected element.
template <int64_t kRun>
void TopByRuns(const float* chunk, int64_t size, int64_t k, int32_t* scratch, int32_t* positions,
               float* values) {
  int32_t* at = scratch;
  int32_t* magnitudes = at + size;
  int32_t* runs = magnitudes + size;
  const int64_t count = MaximaOfRuns<kRun>(chunk, size, runs);
  int64_t reaching;
  const int32_t lower = Threshold(runs, count, k, k + k / 8, &reaching);
  const int64_t found = Collect<kRun>(chunk, size, lower, runs, count, at, magnitudes);
  const int32_t threshold = Threshold(magnitudes, found, k, k, &reaching);
  int64_t above = 0, taken = 0;
  for (int64_t i = 0; i < found; ++i) above += magnitudes[i] > threshold;
  int64_t ties = k - above;  // Number of elements equal to the threshold to take, the first ones.
  for (int64_t i = 0; taken < k; ++i) {
    const bool tie = magnitudes[i] == threshold;
    const bool keep = magnitudes[i] > threshold || (tie && ties > 0);
    positions[taken] = at[i];
    values[taken] = chunk[at[i]];
    taken += keep;
    ties -= tie;
  }
}

void Top(const float* chunk, int64_t size, int64_t k, int32_t* scratch, int32_t* positions,
         float* values) {
  if (size >= 32 * k) {
    TopByRuns<16>(chunk, size, k, scratch, positions, values);
  } else if (size >= 8 * k) {
    TopByRuns<4>(chunk, size, k, scratch, positions, values);
  } else {
    TopByRuns<1>(chunk, size, k, scratch, positions, values);
  }
}
