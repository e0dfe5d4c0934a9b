// Sums decoded values: a thread sums four neighbours, rank by rank.
#include "custom_ops/core/gpu/block.cuh"
#include "custom_ops/core/gpu/quantized_format.cuh"
#include "custom_ops/core/gpu/records.cuh"

namespace redsync {
namespace gpu {
namespace {

constexpr uint32_t kTile = kThreads * 4;            // Elements of a block.
constexpr uint32_t kLargestNegative = 0x80800000u;  // The bits of -2^-126.

struct Call : QuantizedGroup {
  const int32_t* messages;
  int64_t ranks, words;
  RedsyncGpuRecord* record;  // Its position is a bit in the messages.
};

__device__ inline uint32_t ReadBits(const int32_t* words, int at, int count) {
  const int shift = at % 32;
  uint64_t bits = static_cast<uint32_t>(words[at / 32]);
  if (shift + count > 32) bits |= uint64_t{static_cast<uint32_t>(words[at / 32 + 1])} << 32;
  return static_cast<uint32_t>(bits >> shift) & ((1u << count) - 1);
}

// Returns the levels of a bucket in a message; reports invalid scales.
__device__ inline Levels ReadLevels(const Call& call, const int32_t* row, int64_t at) {
  const int step = ScalesPerBucket(call.quantizer);
  for (int i = 0; i < step; ++i) {
    // Denormals count as zero. Even with -ftz=true, nvcc compares a word with zero unflushed.
    const bool negative = step == 1 && static_cast<uint32_t>(row[at]) >= kLargestNegative;
    if (!IsFinite(row[at + i]) || negative) {
      Report(call.record, (row + at + i - call.messages) * 32);
    }
  }
  return MakeLevels(call.quantizer, reinterpret_cast<const float*>(row + at));
}

__global__ void __launch_bounds__(kThreads) AddCodes(REDSYNC_PARAMETER Call call) {
  const int item_index = call.Find();
  const Coded& from = call.items[item_index];
  const int64_t base = int64_t{call.Block(item_index)} * kTile;
  const uint32_t at = threadIdx.x * 4, size = PartSize(from.size, base, kTile);
  const auto most = static_cast<uint32_t>(MaxCode(call.quantizer));
  // A 64-bit division is a call, so it comes first, while few registers are in use.
  const int64_t scales_at =
      from.scales_at + ScalesPerBucket(call.quantizer) * from.BucketOf(base + at);
  Vec4 sum = {};
  for (int64_t rank = 0; rank < call.ranks; ++rank) {
    const int32_t* row = call.messages + rank * call.words;
    if (row[0] != 1) {
      if (row[0] != 0 && threadIdx.x == 0) Report(call.record, rank * call.words * 32);
      continue;
    }
    if (at >= size) continue;
    const Levels levels = ReadLevels(call, row, scales_at);
    const int32_t* words = row + from.words_at + base / 32 * call.bits;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (at + c >= size) continue;
      const int bit = static_cast<int>(at + c) * call.bits;
      const uint32_t code = ReadBits(words, bit, call.bits);
      if (code > most) Report(call.record, (words - call.messages) * 32 + bit);
      sum.at[c] += ValueOf(call.quantizer, levels, code);
    }
  }
  Store(from.out + base, at, size, from.aligned, sum);
}

// Reads the code or word at the position in the record.
__global__ void ReadBad(REDSYNC_PARAMETER Call call, int64_t codes_at) {
  RedsyncGpuRecord* record = call.record;
  if (threadIdx.x != 0 || IsClear(*record)) return;
  const int64_t word = static_cast<int64_t>(record->position / 32);
  const int shift = static_cast<int>(record->position % 32);
  record->value = call.messages[word];
  if (word % call.words >= codes_at) {
    record->value = ReadBits(call.messages + word, shift, call.bits);
  }
}

}  // namespace
}  // namespace gpu
}  // namespace redsync

using namespace redsync::gpu;  // NOLINT: the C interface below is this file's other half.

int redsync_gpu_dequantize(const RedsyncGpuDequantize* call, RedsyncGpuRecord* record,
                           void* stream_pointer) {
  const int64_t words = redsync_gpu_quantized_words(&call->quantizer, call->tensors, call->count);
  if (words < 0 || call->words != words || call->ranks < 0) return REDSYNC_GPU_INVALID_ARGUMENT;
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  ClearRecord(record, stream);
  Call group = {};
  group.quantizer = call->quantizer;
  group.bits = CodeBits(call->quantizer);
  group.messages = call->messages;
  group.ranks = call->ranks;
  group.words = words;
  group.record = record;
  ForTensors(group, call->tensors, call->count, kTile, [&](const Call& part, uint32_t blocks) {
    REDSYNC_LAUNCH(AddCodes, blocks, kThreads, stream, part);
  });
  const int64_t codes_at = 1 + AllScales(call->quantizer, call->tensors, call->count);
  REDSYNC_LAUNCH(ReadBad, 1, 32, stream, group, codes_at);
  return LaunchStatus();
}

int redsync_gpu_explain_dequantize(const RedsyncGpuDequantize* call, const RedsyncGpuRecord* record,
                                   RedsyncGpuCodecError* error) {
  if (IsClear(*record)) return 0;
  const RedsyncGpuQuantizer& q = call->quantizer;
  const int64_t words = call->words;
  const auto position = static_cast<int64_t>(record->position);
  const int64_t rank = position / 32 / words, word = position / 32 % words;
  const double value = static_cast<double>(record->value);
  if (word == 0) {
    *error = {"flag", rank, -1, 0, value, nullptr, 1};
    return 1;
  }
  int64_t at = 1;
  for (int64_t i = 0; i < call->count; ++i) {
    const int64_t scales = Scales(q, call->tensors[i].size);
    if (word < at + scales) {
      const char* rule = q.mode == REDSYNC_GPU_TWO_LEVEL ? "finite" : "finite and >= 0";
      *error = {"scale", rank, i, word - at, FloatOf(record->value), rule, 0};
      return 1;
    }
    at += scales;
  }
  for (int64_t i = 0; i < call->count; ++i) {
    const int64_t codes = Words(q, call->tensors[i].size);
    if (word < at + codes) {
      const int64_t bit = position - (rank * words + at) * 32;
      *error = {"code", rank, i, bit / CodeBits(q), value, nullptr, MaxCode(q)};
      return 1;
    }
    at += codes;
  }
  return 1;
}
