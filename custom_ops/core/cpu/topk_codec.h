// Messages of selected elements with coded positions and values:
//
//   [flag] [count, Golomb code] .. [levels of each tensor] [codes of all values]
//
// or, with 16-bit values, [bfloat16 values of each tensor, starting at a word] at the end. Each
// stream of positions has a Golomb code. In a stream, the elements of each tensor follow those of
// the previous one. See golomb.h and levels.h.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_CPU_TOPK_CODEC_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_CPU_TOPK_CODEC_H_

#include <cstdint>
#include <vector>

#include "custom_ops/core/cpu/codec_error.h"
#include "custom_ops/core/cpu/common.h"
#include "custom_ops/core/cpu/golomb.h"
#include "custom_ops/core/cpu/levels.h"

namespace redsync {

// The selected elements of one tensor.
struct TopKTensor {
  int64_t size = 0;
  int64_t slots = 0;  // Maximum number of selected elements.
  int64_t count = 0;  // Number of selected elements.
  const uint32_t* indices = nullptr;
  const int32_t* values = nullptr;  // Bits of floats below 2^96.
  float* residual = nullptr;        // Receives the coding errors at the indices.
  int64_t stream = 0;               // The stream of its positions.
};

struct TopKFormat {
  std::vector<GolombFormat> streams;  // Size and slots of all tensors of a stream together.
  int value_bits = 1;                 // In [1, kMaxLevelBits], or kHalfBits.

  // Words of all codes of positions.
  int64_t position_words() const;
  // Words of a message; uses only `slots` of each tensor.
  int64_t words(const TopKTensor* tensors, int64_t count) const;
};

// Writes the message, and the coding errors into the residuals. `scratch` has a word for each slot
// of all tensors. Fails only if indices do not ascend or are out of range.
Status EncodeTopK(const TopKFormat& format, const TopKTensor* tensors, int64_t count,
                  uint32_t* scratch, int32_t* message, CodecError* error);

// Decodes a message into [flag] and [count, index * slots, value * slots] of each tensor; see
// message_layout.h. `scratch` has a word for each slot of all tensors. Fails if a code of positions
// is malformed. The caller checks flags, counts and values.
Status DecodeTopK(const TopKFormat& format, const TopKTensor* tensors, int64_t count,
                  const int32_t* message, uint32_t* scratch, int32_t* plain, CodecError* error);

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_CPU_TOPK_CODEC_H_
