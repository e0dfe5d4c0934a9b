#include "custom_ops/core/cpu/chunks.h"

#include <algorithm>

#include "custom_ops/core/cpu/common.h"
#include "custom_ops/core/cpu/simd.h"

// One source, compiled for several instruction sets and chosen at run time.
namespace redsync {
namespace {

inline int32_t MagnitudeBits(float x) { return BitsOf(x) & 0x7fffffff; }

namespace plain {
#include "custom_ops/core/cpu/chunks_inl.h"
}  // namespace plain

#ifdef REDSYNC_X86_VERSIONS
#pragma GCC push_options
#pragma GCC target("avx2")
namespace avx2 {
#include "custom_ops/core/cpu/chunks_inl.h"
}  // namespace avx2
#pragma GCC pop_options
#endif  // REDSYNC_X86_VERSIONS

}  // namespace

void TopOfChunk(const float* chunk, int64_t size, int64_t k, int32_t* scratch, int32_t* positions,
                float* values) {
  if (k <= 0) return;
#ifdef REDSYNC_X86_VERSIONS
  if (WidestSimd() != Simd::kPlain) {
    return avx2::Top(chunk, size, k, scratch, positions, values);
  }
#endif
  plain::Top(chunk, size, k, scratch, positions, values);
}

}  // namespace redsync
