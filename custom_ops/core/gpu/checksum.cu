// Checksums of messages: several blocks sum the terms of a message, and the last block writes the
// seal, or the flag in a valid seal, to word 0.
#include "custom_ops/core/checksum.h"
#include "custom_ops/core/gpu/block.cuh"
#include "custom_ops/core/gpu/c_api.h"
#include "custom_ops/core/gpu/records.cuh"

namespace redsync {
namespace gpu {
namespace {

constexpr int64_t kPerThread = 16;   // Words per thread before another block is added.
constexpr int64_t kMaxBlocks = 256;  // Maximum number of blocks of a message.
constexpr uint32_t kNoSeal = ~0u;    // Not below the prime, so receivers reject it.

// The sum of a message's finished blocks; initially zero.
struct Sum {
  Wide sum;
  uint32_t ticket;
};

int64_t BlocksOf(int64_t words) {
  return std::clamp<int64_t>(CeilDiv(words, kThreads * kPerThread), 1, kMaxBlocks);
}

__device__ inline Wide Power(Wide base, Wide exponent) {
  Wide power = 1;
  for (; exponent > 0; exponent /= 2) {
    if (exponent % 2 == 1) power = power * base % kChecksumPrime;
    base = base * base % kChecksumPrime;
  }
  return power;
}

// Returns the sum of the terms of every `stride`-th word from `first` on, modulo p. Copies these
// words unless `copy` is `words`.
__device__ inline Wide Terms(const int32_t* words, int64_t count, int64_t first, int64_t stride,
                             int32_t* copy) {
  Wide power = Power(kChecksumBase, first + 1), low = 0, high = 0;
  const Wide step = Power(kChecksumBase, stride);
  for (int64_t i = first; i < count; i += stride) {
    const int32_t word = words[i];
    if (copy != words) copy[i] = word;
    const Wide product = static_cast<uint32_t>(word) * power;
    low += product & 0xffffffffu;
    high += product >> 32;
    power = power * step % kChecksumPrime;
  }
  return (low + 5 * high) % kChecksumPrime;  // 2^32 = 5 modulo p.
}

__device__ inline uint32_t SealOf(uint32_t flag, Wide sum) {
  if (flag > 1) return kNoSeal;
  return static_cast<uint32_t>((sum + (flag == 1 ? kFiniteTerm : kNotFiniteTerm)) % kChecksumPrime);
}

__global__ void __launch_bounds__(kThreads)
    Seals(REDSYNC_PARAMETER RedsyncGpuChecksum call, Sum* sums, uint32_t blocks,
          RedsyncGpuRecord* record) {
  const uint32_t row = blockIdx.x / blocks, part = blockIdx.x % blocks;
  const int32_t* message = call.messages + row * call.words;
  int32_t* out = call.out + row * call.words;
  const Wide terms = BlockReduce(Terms(message + 1, call.words - 1, part * kThreads + threadIdx.x,
                                       static_cast<int64_t>(blocks) * kThreads, out + 1),
                                 Add());
  if (threadIdx.x == 0) atomicAdd(&sums[row].sum, terms);
  if (!IsLastBlock(&sums[row].ticket, blocks) || threadIdx.x != 0) return;
  const Wide sum = atomicAdd(&sums[row].sum, Wide{0}) % kChecksumPrime;
  const auto word = static_cast<uint32_t>(message[0]);
  if (call.senders == nullptr) {
    out[0] = static_cast<int32_t>(SealOf(word, sum));
  } else if (call.senders[row] < 0) {
    out[0] = static_cast<int32_t>(word);
  } else {
    out[0] = word == SealOf(1, sum);
    if (word != SealOf(1, sum) && word != SealOf(0, sum)) Report(record, call.senders[row]);
  }
}

}  // namespace
}  // namespace gpu
}  // namespace redsync

using namespace redsync::gpu;  // NOLINT: the C interface below is this file's other half.

int64_t redsync_gpu_checksum_scratch_bytes(const RedsyncGpuChecksum* call) {
  return call->rows * static_cast<int64_t>(sizeof(Sum));
}

int redsync_gpu_checksum(const RedsyncGpuChecksum* call, RedsyncGpuRecord* record, void* scratch,
                         int64_t scratch_bytes, void* stream_pointer) {
  const int64_t blocks = BlocksOf(call->words - 1);
  if (call->words < 1 || call->words > INT32_MAX || call->rows < 0 ||
      call->rows > INT32_MAX / blocks || (call->senders != nullptr && record == nullptr)) {
    return REDSYNC_GPU_INVALID_ARGUMENT;
  }
  if (scratch_bytes < redsync_gpu_checksum_scratch_bytes(call)) {
    return REDSYNC_GPU_SCRATCH_TOO_SMALL;
  }
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  if (record != nullptr) ClearRecord(record, stream);
  if (call->rows == 0) return LaunchStatus();
  cudaMemsetAsync(scratch, 0, call->rows * sizeof(Sum), stream);
  REDSYNC_LAUNCH(Seals, static_cast<uint32_t>(call->rows * blocks), kThreads, stream, *call,
                 static_cast<Sum*>(scratch), static_cast<uint32_t>(blocks), record);
  return LaunchStatus();
}
