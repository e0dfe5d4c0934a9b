// Parameters of the kernels that decode Golomb codes: a group of tensors, passed by value.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_GPU_GOLOMB_DECODE_CUH_
#define TF_REDSYNC_CUSTOM_OPS_CORE_GPU_GOLOMB_DECODE_CUH_

#include "custom_ops/core/gpu/golomb_stream.cuh"
#include "custom_ops/core/gpu/groups.cuh"
#include "custom_ops/core/gpu/records.cuh"

namespace redsync {
namespace gpu {

// Where a chunk begins.
struct Start {
  int64_t position;
  uint32_t slot;
  int32_t state;
};

struct DecodeItem {
  uint32_t* positions;         // [ranks, slots]
  int32_t* counts;             // [ranks, tensors], from this tensor's on.
  int64_t offset;              // In a message, of [count, bits, words..].
  int64_t at;                  // For the record, see GolombPlaces().
  uint32_t* ticket;            // [ranks], see IsLastBlock().
  unsigned long long* beyond;  // [ranks]: the first position that is too large; all ones at first.
  Step* steps;                 // [ranks, chunks, rice + 1]
  Start* starts;               // [ranks, chunks]
  uint32_t size, slots, words;
  int rice;

  __host__ __device__ uint32_t chunks() const { return (words * 32 + kChunkBits - 1) / kChunkBits; }
};

struct DecodeGroup : Group<DecodeItem, 32> {
  const int32_t* messages;
  int64_t stride;     // From one message to the next.
  int64_t positions;  // Of a rank, for the record.
  int64_t tensors;
  RedsyncGpuRecord* record;
};

// For the record a tensor has 0: the count; 1: the bits; and for every slot and the end three.
enum Kind { kIndex, kTooFew, kTooMany };
__host__ __device__ inline int64_t GolombPlaces(int64_t slots) { return 2 + 3 * (slots + 1); }

// One rank's code of a tensor, if its header is right.
struct ReceivedStream : GolombStream {
  uint32_t count;
  bool valid;

  __device__ ReceivedStream(const DecodeGroup& call, const DecodeItem& item) {
    const int32_t* part = call.messages + blockIdx.y * call.stride + item.offset;
    words = reinterpret_cast<const uint32_t*>(part + 2);
    count = static_cast<uint32_t>(part[0]);  // Negative ones are too large.
    bits = static_cast<uint32_t>(part[1]);
    valid = count <= item.slots && bits <= 32 * item.words;
  }
};

__device__ inline void ReportKind(const DecodeGroup& call, const DecodeItem& item, int64_t slot,
                                  Kind kind) {
  Report(call.record, blockIdx.y * call.positions + item.at + 2 + 3 * slot + kind);
}

}  // namespace gpu
}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_GPU_GOLOMB_DECODE_CUH_
