// Lists the positions of set bits in bitmaps.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_GPU_BITMAPS_CUH_
#define TF_REDSYNC_CUSTOM_OPS_CORE_GPU_BITMAPS_CUH_

#include "custom_ops/core/gpu/bits.cuh"

namespace redsync {
namespace gpu {

// Bitmaps, possibly parts of longer rows, and the scratch memory for listing their bits.
struct Bitmaps {
  RedsyncGpuSetBits call;
  int64_t stride;    // Words from one row to the next.
  uint32_t* ticket;  // [rows], see IsLastBlock().
  Tally<1>* before;  // [rows, tiles]: set bits in a tile, later before it.

  Bitmaps(const RedsyncGpuSetBits& call, int64_t stride, Divider* divider)
      : call(call),
        stride(stride),
        ticket(divider->Take<uint32_t>(call.rows)),
        before(divider->Take<Tally<1>>(call.rows * tiles())) {}

  // Tiles of a row: one block per tile, one thread per word.
  __host__ __device__ uint32_t tiles() const {
    return static_cast<uint32_t>((call.size + kThreads - 1) / kThreads);
  }
};

bool IsValid(const RedsyncGpuSetBits& call);

// Queues the kernels that write positions and counts.
void List(const Bitmaps& bitmaps, cudaStream_t stream);

}  // namespace gpu
}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_GPU_BITMAPS_CUH_
