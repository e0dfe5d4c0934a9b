// The steps after the pass, in one launch of co-resident blocks with grid barriers.
#include "custom_ops/core/gpu/compaction.cuh"
#include "custom_ops/core/gpu/cut_search.cuh"

namespace redsync {
namespace gpu {
namespace {

// Blocks handle the groups of all tensors in turn. All blocks reach the same barriers, because the
// conditions depend only on state from before the launch.
__global__ void __launch_bounds__(kThreads) SelectCandidates(REDSYNC_PARAMETER Batch batch) {
  __shared__ uint32_t bins[kBins];
  bool refines = false, searches = false, counts = false;
  for (int i = 0; i < batch.count; ++i) {
    const Tensor& tensor = batch.tensors[i];
    refines |= tensor.state->refine != 0;
    searches |= tensor.threshold;
    counts |= tensor.state->counted == 0;
  }
  auto for_groups = [&](auto step) {
    for (uint32_t b = blockIdx.x; b < batch.first_group[batch.count]; b += gridDim.x) {
      const int item_index = FindItem(batch.first_group, batch.count, b);
      if (b != blockIdx.x) __syncthreads();  // Shared memory may still be read.
      step(batch.tensors[item_index], b - batch.first_group[item_index]);
    }
  };
  auto sync = [&] { SyncGrid(&batch.tensors[0].state->arrived); };

  if (refines) {  // The prediction failed or the pool is too small, so the pool is filled again.
    for (int level = 0; level < kLevels; ++level) {
      for_groups([&](const Tensor& tensor, uint32_t group) {
        FindDigit<FromTensor>(batch, tensor, group, level, bins);
      });
      sync();
    }
    for_groups(
        [&](const Tensor& tensor, uint32_t group) { Count<FromTensor>(batch, tensor, group); });
    sync();
    for_groups(
        [&](const Tensor& tensor, uint32_t group) { Place<FromTensor>(batch, tensor, group); });
    sync();
  }
  if (searches) {
    for_groups([&](const Tensor& tensor, uint32_t group) { Search(batch, tensor, group, bins); });
    sync();
  }
  for (int level = counts ? 0 : 1; level < kLevels; ++level) {
    for_groups([&](const Tensor& tensor, uint32_t group) {
      FindDigit<FromPool>(batch, tensor, group, level, bins);
    });
    sync();
  }
  for_groups([&](const Tensor& tensor, uint32_t group) { Count<FromPool>(batch, tensor, group); });
  sync();
  for_groups([&](const Tensor& tensor, uint32_t group) { Place<FromPool>(batch, tensor, group); });
}

}  // namespace

void LaunchSelectCandidates(const Batch& batch, cudaStream_t stream) {
  const uint32_t blocks =
      std::min(batch.first_group[batch.count], BlocksTogether(SelectCandidates));
  REDSYNC_LAUNCH_TOGETHER(SelectCandidates, blocks, kThreads, stream, batch);
}

}  // namespace gpu
}  // namespace redsync
