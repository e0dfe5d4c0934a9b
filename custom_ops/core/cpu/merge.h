// The sum of sparse blocks, reduced to its largest elements.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_CPU_MERGE_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_CPU_MERGE_H_

#include <cstdint>

#include "custom_ops/core/cpu/codec_error.h"
#include "custom_ops/core/cpu/common.h"

namespace redsync {

struct SparseBlocks {
  const uint32_t* indices;  // [ranks, slots]; the first `count` entries of a row ascend.
  const float* values;      // [ranks, slots]
  const int32_t* counts;    // The count of rank r is counts[r * count_stride].
  int64_t count_stride;
  int64_t ranks;
  int64_t slots;
  int64_t size;  // Indices are in [0, size), at most kMaxElements.
};

// Coordinates, ascending; unused slots hold 0.
struct SparseOutput {
  uint32_t* indices;
  float* values;
  int32_t* count;
};

// Returns the scratch memory for ranks * slots entries, at most 2^31 - 1.
int64_t MergeScratchBytes(int64_t ranks, int64_t slots);

// Adds the values of every index in the order of the ranks, starting from 0. The k non-zero sums of
// largest magnitude (the lower index first among equals) go to `kept` [k], the other non-zero sums
// to `dropped` [ranks * slots].
Status SparseMerge(const SparseBlocks& blocks, int64_t k, void* scratch, int64_t scratch_bytes,
                   const SparseOutput& kept, const SparseOutput& dropped, CodecError* error);

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_CPU_MERGE_H_
