// Adds the messages of all ranks into dense tensors.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_CPU_SUM_MESSAGES_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_CPU_SUM_MESSAGES_H_

#include <cstdint>

#include "custom_ops/core/cpu/common.h"
#include "custom_ops/core/message_layout.h"

namespace redsync {

// int32 [ranks, words], row by row.
struct Messages {
  const int32_t* data;
  int64_t ranks;
  int64_t words;
  const int32_t* row(int64_t rank) const { return data + rank * words; }
};

// One tensor's part of every message.
struct Part {
  int64_t offset;  // Offset of the count, in words.
  int64_t capacity;
  int64_t size;  // Elements of the tensor, at most kMaxElements.
  bool quantized;

  int64_t words() const { return PartWords(quantized, capacity); }
  const uint32_t* indices(const int32_t* row) const {
    return reinterpret_cast<const uint32_t*>(row + offset + IndicesAt(quantized));
  }
  const int32_t* values(const int32_t* row) const {
    return row + offset + ValuesAt(quantized, capacity);
  }
};

// The first invalid field. `field` is "flag", "count", "index", "value" or "mean". For "value" and
// "mean", `value` has the bits of the float. `tensor` is -1 for a flag.
struct DecodeError {
  const char* field = nullptr;
  int64_t rank = 0;
  int64_t tensor = -1;
  int64_t slot = 0;
  int64_t value = 0;
  int64_t limit = 0;  // An index must be below this, a flag or count at most this.
};

// Checks that in every message indices ascend and are in range, and values are finite. Messages
// with flag 0 are ignored.
Status Validate(const Messages& messages, const Part* parts, int64_t tensors, DecodeError* error);

// out = sum over ranks, in the order of the ranks. Call Validate() on the messages before.
void SumMessages(const Messages& messages, const Part& part, const ParallelFor& parallel_for,
                 float* out);

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_CPU_SUM_MESSAGES_H_
