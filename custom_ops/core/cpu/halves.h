// Numbers of 16 bits, two in a word: `half_encode` in tf_redsync/ops/wire.py defines the
// messages.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_CPU_HALVES_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_CPU_HALVES_H_

#include <cstdint>

#include "custom_ops/core/cpu/common.h"

namespace redsync {

enum class Half { kFloat16, kBfloat16 };

// Words of the message of a row, [flag, halves..]; its size is even.
inline int64_t HalfWords(int64_t size) { return 1 + size / 2; }

// Writes a message of HalfWords(size) words for each of the rows of `x`, and x - decoded (`errors`
// may be `x`). All messages are zero, and errors unspecified, if a rounded element is not finite.
void EncodeHalves(Half half, const float* x, int64_t rows, int64_t size,
                  const ParallelFor& parallel_for, int32_t* messages, float* errors);

// Writes the values of each row's message, [rows, size]; or, if `sum`, their sums over the rows in
// the order of the rows, [size].
void DecodeHalves(Half half, const int32_t* messages, int64_t rows, int64_t size, bool sum,
                  const ParallelFor& parallel_for, float* out);

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_CPU_HALVES_H_
