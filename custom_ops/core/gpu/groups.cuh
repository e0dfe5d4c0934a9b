// Groups of items, such as tensors, in one launch; each item has its own blocks.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_GPU_GROUPS_CUH_
#define TF_REDSYNC_CUSTOM_OPS_CORE_GPU_GROUPS_CUH_

#include <algorithm>

#include "custom_ops/core/gpu/platform.cuh"

namespace redsync {
namespace gpu {

// Returns the index of a block's item; first[i] is the number of blocks before those of item i.
__device__ inline int FindItem(const uint32_t* first, int count, uint32_t block) {
  int which = 0;
  while (which + 1 < count && first[which + 1] <= block) ++which;
  return which;
}

// A kernel's parameters: the items. Derived structures add the parameters that all items share.
template <class ItemType, int kMaxItems>
struct Group {
  using Item = ItemType;
  static constexpr int kMost = kMaxItems;

  Item items[kMaxItems];
  uint32_t first[kMaxItems + 1];  // Number of blocks before those of each item.
  int count;

  __device__ int Find() const { return FindItem(first, count, blockIdx.x); }
  // Returns the index of this block among its item's blocks, and their number.
  __device__ uint32_t Block(int which) const { return blockIdx.x - first[which]; }
  __device__ uint32_t Blocks(int which) const { return first[which + 1] - first[which]; }
};

constexpr int64_t kMaxParameters = 4096;  // Bytes of all parameters of a kernel.

// Calls launch(group, blocks) for groups of the items make(0), make(1), .. An item has
// blocks_of(item) blocks, at least one. `group` has the parameters that all items share.
template <class G, class Make, class BlocksOf, class Launch>
void ForGroups(G group, int64_t count, Make make, BlocksOf blocks_of, Launch launch) {
  static_assert(sizeof(G) <= kMaxParameters, "parameters of a kernel");
  for (int64_t i = 0; i < count; i += G::kMost) {
    group.count = static_cast<int>(std::min<int64_t>(G::kMost, count - i));
    for (int j = 0; j < group.count; ++j) {
      group.items[j] = make(i + j);
      const int64_t blocks = std::max<int64_t>(blocks_of(group.items[j]), 1);
      group.first[j + 1] = group.first[j] + static_cast<uint32_t>(blocks);
    }
    launch(group, group.first[group.count]);
  }
}

}  // namespace gpu
}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_GPU_GROUPS_CUH_
