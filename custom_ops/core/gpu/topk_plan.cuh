// Offsets in the messages of top-k elements, which the host computes.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_GPU_TOPK_PLAN_CUH_
#define TF_REDSYNC_CUSTOM_OPS_CORE_GPU_TOPK_PLAN_CUH_

#include <vector>

#include "custom_ops/core/gpu/bits.cuh"
#include "custom_ops/core/gpu/topk_api.h"
#include "custom_ops/core/message_layout.h"

namespace redsync {
namespace gpu {

constexpr int64_t kHalfBits = 16;  // Bits of a bfloat16, which replaces a code with levels.
constexpr int64_t kMaxLevelBits = 4;
constexpr int kMaxCells = 1 << (kMaxLevelBits - 1);  // Magnitudes of a tensor.
constexpr int64_t kSlotTile = 4096;                  // Slots of a block.

// Offsets in an encoded message and in the plain one.
struct TopKPlan {
  std::vector<RedsyncGpuPositions> streams;
  std::vector<int64_t> starts;  // Offset of each tensor's positions in its stream.
  std::vector<int64_t> firsts;  // First slot of each tensor among those of all tensors.
  std::vector<int64_t> parts;   // Offset of each tensor's part in the plain message.
  std::vector<int64_t> values;  // Offset of each tensor's levels or halves in the coded message.
  int64_t slots = 0;            // Slots of all tensors.
  int64_t plain_words = kHeaderWords;
  int64_t codes_at = 0;  // Offset of the codes in the coded message, after positions and levels.
  int64_t words = -1;    // Words of the coded message; -1 if the format is invalid.
  int64_t cells = 0;     // Number of levels of a tensor.

  explicit TopKPlan(const RedsyncGpuTopKFormat& format) {
    const int64_t bits = format.value_bits;
    if ((bits < 1 || bits > kMaxLevelBits) && bits != kHalfBits) return;
    for (int64_t s = 0; s < format.streams; ++s) {
      streams.push_back({0, 0, format.rice[s], nullptr, nullptr});
    }
    for (int64_t i = 0; i < format.count; ++i) {
      const RedsyncGpuTopKTensor& t = format.tensors[i];
      if (t.size < 0 || t.slots < 0 || t.slots > t.size || t.stream < 0 ||
          t.stream >= format.streams) {
        return;
      }
      RedsyncGpuPositions& stream = streams[t.stream];
      starts.push_back(stream.size);
      firsts.push_back(slots);
      parts.push_back(plain_words);
      stream.size += t.size;
      stream.slots += t.slots;
      slots += t.slots;
      plain_words += PartWords(false, t.slots);
      if (stream.size > INT32_MAX) return;
    }
    const int64_t positions = redsync_gpu_golomb_words(streams.data(), format.streams);
    if (positions < 0 || slots > INT32_MAX) return;
    cells = bits == kHalfBits ? 0 : int64_t{1} << (bits - 1);
    codes_at = kHeaderWords + positions;
    for (int64_t i = 0; i < format.count; ++i) {
      values.push_back(codes_at);
      codes_at += bits == kHalfBits ? CeilDiv(format.tensors[i].slots, 2) : cells;
    }
    words = codes_at + (bits == kHalfBits ? 0 : PackedWords(slots, bits));
  }
};

}  // namespace gpu
}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_GPU_TOPK_PLAN_CUH_
