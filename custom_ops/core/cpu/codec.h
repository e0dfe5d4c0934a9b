// What the codecs of messages share: how they name what is wrong with a received message.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_CPU_CODEC_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_CPU_CODEC_H_

#include <cstdint>

#include "custom_ops/core/cpu/common.h"

namespace redsync {

// The first thing found wrong with an input or a message. Where several threads look, "first" is in
// the order of tensor, rank and slot, so that the report does not depend on the threads.
struct CodecError {
  const char* field = nullptr;  // What it is: "count", "index", "code", ...
  int64_t rank = -1;            // -1: it is not a received message.
  int64_t tensor = -1;          // -1: it belongs to no tensor.
  int64_t slot = 0;             // Which of the fields of that name.
  double value = 0;
  const char* rule = nullptr;  // What is required; null: to be in [0, limit].
  int64_t limit = 0;

  bool found() const { return field != nullptr; }
};

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_CPU_CODEC_H_
