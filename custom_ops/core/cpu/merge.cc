#include "custom_ops/core/cpu/merge.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "custom_ops/core/cpu/candidates.h"

namespace redsync {
namespace {

Status ValidateRank(const SparseBlocks& blocks, int64_t rank, CodecError* error) {
  const int32_t count = blocks.counts[rank * blocks.count_stride];
  const uint32_t* indices = blocks.indices + rank * blocks.slots;
  const float* values = blocks.values + rank * blocks.slots;
  error->rank = rank;
  if (count < 0 || count > blocks.slots) {
    return Fail("count", 0, count, blocks.slots, nullptr, error);
  }
  int64_t last = -1;
  for (int32_t i = 0; i < count; ++i) {
    const Status status = CheckAscending(indices[i], last, blocks.size, i, error);
    if (status != Status::kOk) return status;
    if (!std::isfinite(values[i])) return Fail("value", i, values[i], 0, "finite", error);
    last = indices[i];
  }
  return Status::kOk;
}

// Returns the sort key of an entry: its index above its location. Entries sort by index, then rank.
uint64_t EntryKey(uint32_t index, int64_t at) {
  return static_cast<uint64_t>(index) << 32 | static_cast<uint64_t>(at);
}

// Sorts all entries by index and rank, by merging the ranks' runs in pairs. `runs` has the start of
// each run. Returns the buffer, `keys` or `other`, that has the result.
uint64_t* MergeRuns(uint64_t* keys, uint64_t* other, int64_t* runs, int64_t count) {
  while (count > 1) {
    int64_t merged = 0;
    for (int64_t r = 0; r < count; r += 2) {
      const int64_t begin = runs[r], middle = runs[std::min(r + 1, count)],
                    end = runs[std::min(r + 2, count)];
      std::merge(keys + begin, keys + middle, keys + middle, keys + end, other + begin);
      runs[merged++] = begin;
    }
    runs[merged] = runs[count];
    count = merged;
    std::swap(keys, other);
  }
  return keys;
}

struct Parts {
  uint64_t* keys;
  uint64_t* other;
  int64_t* runs;
};

Parts Divide(const SparseBlocks& blocks, void* scratch) {
  const int64_t entries = blocks.ranks * blocks.slots;
  auto* keys = static_cast<uint64_t*>(scratch);
  return {keys, keys + entries, reinterpret_cast<int64_t*>(keys + 2 * entries)};
}

void Put(const SparseOutput& out, int64_t at, uint32_t index, float value) {
  out.indices[at] = index;
  out.values[at] = value;
}

void Pad(const SparseOutput& out, int64_t count, int64_t slots) {
  std::fill(out.indices + count, out.indices + slots, 0);
  std::fill(out.values + count, out.values + slots, 0.0f);
  *out.count = static_cast<int32_t>(count);
}

}  // namespace

int64_t MergeScratchBytes(int64_t ranks, int64_t slots) {
  return 8 * (2 * ranks * slots + ranks + 1);
}

Status SparseMerge(const SparseBlocks& blocks, int64_t k, void* scratch, int64_t scratch_bytes,
                   const SparseOutput& kept, const SparseOutput& dropped, CodecError* error) {
  const int64_t entries = blocks.ranks * blocks.slots;
  if (k < 0 || entries > INT32_MAX) return Status::kInvalidArgument;
  if (scratch_bytes < MergeScratchBytes(blocks.ranks, blocks.slots)) {
    return Status::kScratchTooSmall;
  }
  ScopedFlushDenormals flush;
  const Parts parts = Divide(blocks, scratch);
  int64_t used = 0;
  for (int64_t rank = 0; rank < blocks.ranks; ++rank) {
    const Status status = ValidateRank(blocks, rank, error);
    if (status != Status::kOk) return status;
    parts.runs[rank] = used;
    const int64_t first = rank * blocks.slots;
    for (int32_t i = 0; i < blocks.counts[rank * blocks.count_stride]; ++i) {
      parts.keys[used++] = EntryKey(blocks.indices[first + i], first + i);
    }
  }
  parts.runs[blocks.ranks] = used;
  uint64_t* merged = MergeRuns(parts.keys, parts.other, parts.runs, blocks.ranks);
  uint64_t* work = merged == parts.keys ? parts.other : parts.keys;

  // Sums in place: each index and the bits of its sum replace the entries.
  int64_t sums = 0;
  for (int64_t i = 0; i < used;) {
    const uint64_t index = merged[i] >> 32;
    float sum = 0;
    for (; i < used && merged[i] >> 32 == index; ++i) {
      sum += blocks.values[static_cast<uint32_t>(merged[i])];
    }
    if (sum != 0) merged[sums++] = index << 32 | static_cast<uint32_t>(BitsOf(sum));
  }
  auto rank_key = [](uint64_t sum) {  // Sorts by magnitude; the lower index is higher.
    return MakeKey(static_cast<int32_t>(sum) & 0x7fffffff, static_cast<int64_t>(sum >> 32), false);
  };
  uint64_t cutoff = 0;
  if (sums > k && k > 0) {
    std::transform(merged, merged + sums, work, rank_key);
    std::nth_element(work, work + k - 1, work + sums, std::greater<uint64_t>());
    cutoff = work[k - 1];
  }
  int64_t keep = 0, drop = 0;
  for (int64_t i = 0; i < sums; ++i) {
    const bool stays = k > 0 && rank_key(merged[i]) >= cutoff;
    Put(stays ? kept : dropped, stays ? keep++ : drop++, static_cast<uint32_t>(merged[i] >> 32),
        FloatOf(static_cast<int32_t>(merged[i])));
  }
  Pad(kept, keep, k);
  Pad(dropped, drop, entries);
  return Status::kOk;
}

}  // namespace redsync
