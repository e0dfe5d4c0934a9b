// Block quantization: numbers of a few bits and a shared scale per block, symmetric around zero.
// `block_quantize` in tf_redsync/ops/block_quantization.py defines the format and the arithmetic.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_CPU_BLOCK_QUANTIZE_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_CPU_BLOCK_QUANTIZE_H_

#include <cstdint>

#include "custom_ops/core/cpu/common.h"

namespace redsync {

constexpr int64_t kBlockUnit = 32;  // Blocks and rows have a multiple of this number of elements.

// The layout of a row's message: [flag, scales (two bfloat16 in a word).., codes..].
struct BlockFormat {
  int64_t bits = 8;     // 8, 4 or 2.
  int64_t block = 256;  // Elements that share a scale, a multiple of kBlockUnit.

  // The scale of a block in units; values are multiples of a unit.
  int32_t limit() const { return bits == 4 ? 12 : (1 << (bits - 1)) - 1; }
  int64_t pairs(int64_t size) const { return CeilDiv(size, 2 * block); }
  int64_t words(int64_t size) const { return 1 + pairs(size) + size / 32 * bits; }
};

// Writes a message of format.words(size) words for each of the rows of `x` and, if `errors` is not
// null, x - decoded (`errors` may be `x`). All messages are zero if an element is not finite or has
// a magnitude of 2^126 or more. `size` is a multiple of kBlockUnit.
void BlockQuantize(const BlockFormat& format, const float* x, int64_t rows, int64_t size,
                   const ParallelFor& parallel_for, int32_t* messages, float* errors);

// Writes the values of each row's message, [rows, size]; or, if `sum`, their sums over the rows in
// the order of the rows, [size].
void BlockDequantize(const BlockFormat& format, const int32_t* messages, int64_t rows, int64_t size,
                     bool sum, const ParallelFor& parallel_for, float* out);

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_CPU_BLOCK_QUANTIZE_H_
