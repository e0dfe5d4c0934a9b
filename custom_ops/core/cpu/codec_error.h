// Errors of the codecs: the first invalid field of an input or of a received message.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_CPU_CODEC_ERROR_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_CPU_CODEC_ERROR_H_

#include <cstdint>

#include "custom_ops/core/cpu/common.h"

namespace redsync {

// The first invalid field of an input or a message. With several threads, "first" is in the order
// of tensor, rank and slot, so that the error does not depend on the threads.
struct CodecError {
  const char* field = nullptr;  // "count", "index", "code", ...
  int64_t rank = -1;            // -1 if it is not a received message.
  int64_t tensor = -1;          // -1 if it belongs to no tensor.
  int64_t slot = 0;             // Index among the fields of this name.
  double value = 0;
  const char* rule = nullptr;  // The requirement; null for "in [0, limit]".
  int64_t limit = 0;

  bool found() const { return field != nullptr; }
};

// Fills an error; the caller adds the rank of a received message.
inline Status Fail(const char* field, int64_t slot, double value, int64_t limit, const char* rule,
                   CodecError* error) {
  error->field = field;
  error->slot = slot;
  error->value = value;
  error->limit = limit;
  error->rule = rule;
  return Status::kInvalidMessage;
}

// Checks that position number `i` is below `size` and above `last`, the one before it.
inline Status CheckAscending(uint32_t position, int64_t last, int64_t size, int64_t i,
                             CodecError* error) {
  if (position >= size) {
    return Fail("index", i, static_cast<double>(ReportedIndex(position, size)), size - 1, nullptr,
                error);
  }
  if (position <= last) return Fail("index", i, position, 0, "ascending", error);
  return Status::kOk;
}

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_CPU_CODEC_ERROR_H_
