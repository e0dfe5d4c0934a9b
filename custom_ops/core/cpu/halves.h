// 16-bit floats, two in a word. tf_redsync/ops/halves.py defines the messages.
//
// A vector is the concatenation of the tensors of a bucket. It is cut into blocks of `size`
// elements, an even number; the last block is padded with zeros.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_CPU_HALVES_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_CPU_HALVES_H_

#include <cstdint>
#include <vector>

#include "custom_ops/core/cpu/common.h"

namespace redsync {

enum class Half { kFloat16, kBfloat16 };

// A tensor of the vector. `errors` may be `x` or `residual`, which may be null.
struct HalfTensor {
  int64_t size = 0;
  const float* x = nullptr;
  const float* residual = nullptr;
  float* errors = nullptr;
};

// Returns the words of a block's message, [flag, halves..].
inline int64_t HalfWords(int64_t size) { return 1 + size / 2; }

// Returns the size of each of `blocks` blocks that hold `elements` elements.
inline int64_t HalfBlock(int64_t elements, int64_t blocks) {
  return 2 * CeilDiv(elements, 2 * blocks);
}

// Rounds x + residual; writes a message for each block, and the rounding errors to `errors`. All
// messages are zero, and errors unspecified, if a rounded element is not finite.
void EncodeHalves(Half half, const std::vector<HalfTensor>& tensors, int64_t blocks, int64_t size,
                  const ParallelFor& parallel_for, int32_t* messages);

// Sums the messages of one block in their order, and adds the block's errors. Rounds the sum into
// `message`, and replaces the block's errors by the errors of this rounding. `x` and `residual` are
// not used.
void ReduceHalves(Half half, const int32_t* messages, int64_t count, int64_t size, int64_t block,
                  const std::vector<HalfTensor>& tensors, const ParallelFor& parallel_for,
                  int32_t* message);

// Decodes the messages of all blocks into the memory of `errors`.
void DecodeHalves(Half half, const int32_t* messages, int64_t blocks, int64_t size,
                  const std::vector<HalfTensor>& tensors, const ParallelFor& parallel_for);

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_CPU_HALVES_H_
