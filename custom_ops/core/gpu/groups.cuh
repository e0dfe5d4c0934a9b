// Groups of items, such as tensors, in one launch; each item has its own blocks.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_GPU_GROUPS_CUH_
#define TF_REDSYNC_CUSTOM_OPS_CORE_GPU_GROUPS_CUH_

#include <algorithm>

#include "custom_ops/core/gpu/platform.cuh"

namespace redsync {
namespace gpu {

// Returns the index of a block's item; first[i] is the number of blocks before those of item i.
__device__ inline int FindItem(const uint32_t* first, int count, uint32_t block) {
  int item_index = 0;
  while (item_index + 1 < count && first[item_index + 1] <= block) ++item_index;
  return item_index;
}

// A kernel's parameters: the items. Derived structures add the parameters that all items share.
template <class ItemType, int kMaxItems>
struct Group {
  using Item = ItemType;
  static constexpr int kCapacity = kMaxItems;

  Item items[kMaxItems];
  uint32_t first[kMaxItems + 1];  // Number of blocks before those of each item.
  int count;

  __device__ int Find() const { return FindItem(first, count, blockIdx.x); }
  // Returns the index of this block among its item's blocks, and their number.
  __device__ uint32_t Block(int item_index) const { return blockIdx.x - first[item_index]; }
  __device__ uint32_t Blocks(int item_index) const {
    return first[item_index + 1] - first[item_index];
  }
};

constexpr int64_t kMaxParameters = 4096;  // Bytes of all parameters of a kernel.

// Calls launch(group, blocks) for groups of the items make(0), make(1), .. An item has
// blocks_of(item) blocks, at least one. `group` has the parameters that all items share.
template <class G, class Make, class BlocksOf, class Launch>
void ForGroups(G group, int64_t count, Make make, BlocksOf blocks_of, Launch launch) {
  static_assert(sizeof(G) <= kMaxParameters, "parameters of a kernel");
  for (int64_t i = 0; i < count; i += G::kCapacity) {
    group.count = static_cast<int>(std::min<int64_t>(G::kCapacity, count - i));
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
