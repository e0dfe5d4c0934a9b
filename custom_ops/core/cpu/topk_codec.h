// Messages of selected elements with coded positions and values:
//
//   [flag] [count, Golomb code] .. [levels of each tensor] [codes of all values]
//
// or, with values of 16 bits, [bfloat16 values of each tensor, from a new word on] at the end.
// There is a Golomb code for every stream of positions, and in a stream the elements of a tensor
// follow those of the one before. See golomb.h and levels.h.
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
  int64_t slots = 0;  // Elements that may be selected.
  int64_t count = 0;  // Elements that are.
  const uint32_t* indices = nullptr;
  const int32_t* values = nullptr;  // Bits of floats below 2^96.
  float* residual = nullptr;        // Gets the coding error at the indices.
  int64_t stream = 0;               // That its positions are in.
};

struct TopKFormat {
  std::vector<GolombFormat> streams;  // Size and slots of all tensors of a stream together.
  int value_bits = 1;                 // In [1, kMaxLevelBits], or kHalfBits.

  // Words of all codes of positions.
  int64_t position_words() const;
  // Words of a message; of each tensor only `slots` is looked at.
  int64_t words(const TopKTensor* tensors, int64_t count) const;
};

// Writes the message, and the residuals at the selected elements. `scratch` has room for the slots
// of all tensors. Fails only if indices do not ascend or are out of range.
Status EncodeTopK(const TopKFormat& format, const TopKTensor* tensors, int64_t count,
                  uint32_t* scratch, int32_t* message, CodecError* error);

// Decodes a message into [flag] and [count, index * slots, value * slots] of each tensor, see
// message_layout.h. `scratch` has room for the slots of all tensors. Fails if a code of positions
// is malformed. The caller checks flags, counts and values.
Status DecodeTopK(const TopKFormat& format, const TopKTensor* tensors, int64_t count,
                  const int32_t* message, uint32_t* scratch, int32_t* plain, CodecError* error);

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_CPU_TOPK_CODEC_H_
