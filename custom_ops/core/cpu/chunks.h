// Exact top-k of a chunk, a short vector that fits the L1 cache.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_CPU_CHUNKS_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_CPU_CHUNKS_H_

#include <cstdint>

namespace redsync {

// Entries of scratch memory that TopOfChunk needs.
constexpr int64_t ChunkScratch(int64_t size) { return 3 * size; }

// Writes the positions of the `k` elements of largest magnitude, ascending, and the elements.
// Magnitudes compare as bits, so NaNs are the largest; among equals the first are taken.
// 0 <= k <= size < 2^31.
void TopOfChunk(const float* chunk, int64_t size, int64_t k, int32_t* scratch, int32_t* positions,
                float* values);

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_CPU_CHUNKS_H_
