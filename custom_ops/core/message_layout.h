// The layout of messages with selected elements. `MessageLayout` in
// tf_redsync/ops/message_layout.py describes the words; a test compares both definitions:
//
//   [flag] then for every tensor [count, index * capacity, value * capacity]
//                   or, quantized, [count, mean, index * capacity]
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_MESSAGE_LAYOUT_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_MESSAGE_LAYOUT_H_

#include <cstdint>

#ifdef __CUDACC__
#define REDSYNC_ANYWHERE __host__ __device__
#else
#define REDSYNC_ANYWHERE
#endif

namespace redsync {

constexpr int64_t kHeaderWords = 1;
constexpr int64_t kCountWords = 1;
constexpr int64_t kMeanWords = 1;

// The bits of 2^96. Values in messages are below it, so that no sum over workers overflows.
constexpr int32_t kTooLargeBits = 0x6f800000;

// Returns the words of one tensor's part.
REDSYNC_ANYWHERE constexpr int64_t PartWords(bool quantized, int64_t capacity) {
  return kCountWords + (quantized ? kMeanWords : capacity) + capacity;
}

// Returns the offset of the indices in a part, in words.
REDSYNC_ANYWHERE constexpr int64_t IndicesAt(bool quantized) {
  return kCountWords + (quantized ? kMeanWords : 0);
}

// Returns the offset of the values in a part, or of the mean if the tensor is quantized, in words.
REDSYNC_ANYWHERE constexpr int64_t ValuesAt(bool quantized, int64_t capacity) {
  return kCountWords + (quantized ? 0 : capacity);
}

}  // namespace redsync

#undef REDSYNC_ANYWHERE

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_MESSAGE_LAYOUT_H_
