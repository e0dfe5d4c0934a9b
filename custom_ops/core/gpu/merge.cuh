// Parameters of the kernels of the sparse merge: a group of tensors, passed by value.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_GPU_MERGE_CUH_
#define TF_REDSYNC_CUSTOM_OPS_CORE_GPU_MERGE_CUH_

#include "custom_ops/core/gpu/compression_api.h"
#include "custom_ops/core/gpu/digits.cuh"
#include "custom_ops/core/gpu/groups.cuh"

namespace redsync {
namespace gpu {

constexpr uint32_t kSlice = 256;                  // Sums that a warp places.
constexpr uint32_t kMergeTile = kSlice * kWarps;  // Entries or sums of a block.

// A tensor's state between kernels; initially zero.
struct MergeState {
  Histogram histogram;
  Digits digits;
};

struct MergeItem {
  RedsyncGpuBlocks blocks;
  const int32_t* counts;  // [ranks, tensors], from this tensor on.
  int32_t *kept, *dropped;
  int64_t at;  // See Position().
  MergeState* state;
  uint64_t* sums;    // [entries]: index and bits of each sum, ascending; 0 if there is none.
  Tally<3>* before;  // [slices]: sums above the cut, ties, all sums; in a slice, later before it.
  uint32_t entries;

  __host__ __device__ uint32_t slices() const { return (entries + kSlice - 1) / kSlice; }
};

struct MergeGroup : Group<MergeItem, 24> {
  int64_t ranks, tensors;
  RedsyncGpuRecord* record;

  __device__ int32_t Count(const MergeItem& item, int64_t rank) const {
    return item.counts[rank * tensors];
  }
};

// Selects among the sums, and writes them.
void LaunchMergeSelect(const MergeGroup& group, uint32_t blocks, cudaStream_t stream);

}  // namespace gpu
}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_GPU_MERGE_CUH_
