// Adds the messages of all ranks into dense tensors. A block owns a chunk of the output and adds
// rank by rank, in one pass over the output, without atomics and with a deterministic result.
#include "custom_ops/core/gpu/block.cuh"
#include "custom_ops/core/gpu/c_api.h"
#include "custom_ops/core/gpu/groups.cuh"
#include "custom_ops/core/gpu/records.cuh"
#include "custom_ops/core/gpu/runs.cuh"
#include "custom_ops/core/message_layout.h"

namespace redsync {
namespace gpu {
namespace {

constexpr int64_t kTile = 4096;  // Slots that a block checks.

struct Parts : Group<RedsyncGpuPart, 64> {
  const int32_t* messages;
  int64_t ranks, words;
  RedsyncGpuRecord* record;
};

__device__ inline const uint32_t* Indices(const RedsyncGpuPart& part, const int32_t* row) {
  return reinterpret_cast<const uint32_t*>(row + part.offset + IndicesAt(part.quantized != 0));
}

__device__ inline float Value(const RedsyncGpuPart& part, const int32_t* row, int64_t slot) {
  const int32_t* values = row + part.offset + ValuesAt(part.quantized != 0, part.capacity);
  return __int_as_float(part.quantized ? *values : values[slot]);
}

// Records the first invalid word of all messages: indices must ascend and be in range, values must
// be finite. One block per tile of slots and rank.
__global__ void __launch_bounds__(kThreads) Check(REDSYNC_PARAMETER Parts all) {
  const int item_index = all.Find();
  const RedsyncGpuPart& part = all.items[item_index];
  const int32_t* row = all.messages + blockIdx.y * all.words;
  auto report = [&](const int32_t* word) { Report(all.record, word - all.messages); };
  if (row[0] != 1) {
    if (row[0] != 0 && threadIdx.x == 0) report(row);
    return;
  }
  const int32_t count = row[part.offset];
  if (count < 0 || count > part.capacity) {
    if (threadIdx.x == 0) report(row + part.offset);
    return;
  }
  const uint32_t* indices = Indices(part, row);
  const auto* words = reinterpret_cast<const int32_t*>(indices);  // The values follow.
  const int64_t begin = static_cast<int64_t>(all.Block(item_index)) * kTile;
  const int64_t end = begin + kTile < count ? begin + kTile : count;
  for (int64_t slot = begin + threadIdx.x; slot < end; slot += kThreads) {
    const bool ascends = slot == 0 || indices[slot] > indices[slot - 1];
    if (!ascends || indices[slot] >= part.size) report(words + slot);
    if (!part.quantized && !IsFinite(words[part.capacity + slot])) {
      report(words + part.capacity + slot);
    }
  }
  const int32_t* mean = row + part.offset + ValuesAt(true, part.capacity);
  if (part.quantized && threadIdx.x == 0 && !IsFinite(*mean)) report(mean);
}

// One chunk of a total per block.
__global__ void __launch_bounds__(kThreads) AddRanks(REDSYNC_PARAMETER Parts all) {
  if (!IsClear(*all.record)) {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      all.record->value = all.messages[all.record->position];
    }
    return;
  }
  const int item_index = all.Find();
  const RedsyncGpuPart& part = all.items[item_index];
  const int64_t begin = static_cast<int64_t>(all.Block(item_index)) * kSpan;
  const int64_t end = begin + kSpan < part.size ? begin + kSpan : part.size;
  __shared__ float sums[kSpan];
  __shared__ Bounds bounds[kRunsAtOnce];
  for (int64_t i = threadIdx.x; i < kSpan; i += kThreads) sums[i] = 0;
  for (int64_t first = 0; first < all.ranks; first += kRunsAtOnce) {
    const int64_t ranks = all.ranks - first < kRunsAtOnce ? all.ranks - first : kRunsAtOnce;
    FindBounds(begin, end, static_cast<int>(ranks), bounds, [&](int run) {
      const int32_t* row = all.messages + (first + run) * all.words;
      return Run{Indices(part, row), 0, row[0] == 0 ? 0u : static_cast<uint32_t>(row[part.offset])};
    });
    auto load = [&](int run, uint32_t i) {
      const int32_t* row = all.messages + (first + run) * all.words;
      return Entry{Indices(part, row)[i], Value(part, row, i)};
    };
    ForEntries(bounds, static_cast<int>(ranks), load,
               [&](const Entry& entry) { sums[entry.index - begin] += entry.value; });
  }
  for (int64_t i = threadIdx.x; i < end - begin; i += kThreads) part.total[begin + i] = sums[i];
}

bool IsValid(const RedsyncGpuSumMessages& call) {
  if (call.ranks < 0 || call.ranks > 65535 || call.words < 1) return false;
  for (int64_t i = 0; i < call.count; ++i) {
    const RedsyncGpuPart& part = call.parts[i];
    const int64_t words = PartWords(part.quantized != 0, part.capacity);
    if (part.size < 0 || part.size > UINT32_MAX || part.capacity < 0 ||
        part.offset < kHeaderWords || part.offset + words > call.words) {
      return false;
    }
  }
  return true;
}

}  // namespace
}  // namespace gpu
}  // namespace redsync

using namespace redsync::gpu;  // NOLINT: the C interface below is this file's other half.

int redsync_gpu_sum_messages(const RedsyncGpuSumMessages* call, RedsyncGpuRecord* record,
                             void* stream_pointer) {
  if (!IsValid(*call)) return REDSYNC_GPU_INVALID_ARGUMENT;
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  ClearRecord(record, stream);
  Parts all = {};
  all.messages = call->messages;
  all.ranks = call->ranks;
  all.words = call->words;
  all.record = record;
  auto part = [&](int64_t i) { return call->parts[i]; };
  auto tiles = [](const RedsyncGpuPart& part) { return CeilDiv(part.capacity, kTile); };
  auto spans = [](const RedsyncGpuPart& part) { return CeilDiv(part.size, kSpan); };
  ForGroups(all, call->count, part, tiles, [&](const Parts& parts, uint32_t blocks) {
    const dim3 grid(blocks, static_cast<uint32_t>(call->ranks));
    if (call->ranks > 0) REDSYNC_LAUNCH(Check, grid, kThreads, stream, parts);
  });
  ForGroups(all, call->count, part, spans, [&](const Parts& parts, uint32_t blocks) {
    REDSYNC_LAUNCH(AddRanks, blocks, kThreads, stream, parts);
  });
  return LaunchStatus();
}

int redsync_gpu_explain_sum_messages(const RedsyncGpuSumMessages* call,
                                     const RedsyncGpuRecord* record, RedsyncGpuError* error) {
  if (IsClear(*record)) return 0;
  const int64_t position = static_cast<int64_t>(record->position);
  const int64_t word = position % call->words;
  *error = {"flag", position / call->words, -1, 0, record->value, 1};
  for (int64_t i = 0; i < call->count && word >= call->parts[i].offset; ++i) {
    const RedsyncGpuPart& part = call->parts[i];
    const int64_t at = word - part.offset, first_index = redsync::IndicesAt(part.quantized != 0);
    const bool is_index = at >= first_index && at < first_index + part.capacity;
    error->tensor = i;
    error->value = is_index ? ReportedIndex(record->value, part.size) : record->value;
    error->limit = at == 0 ? part.capacity : part.size;
    error->field = at == 0 ? "count" : at < first_index ? "mean" : is_index ? "index" : "value";
    error->slot = at < first_index ? 0
                  : is_index       ? at - first_index
                                   : at - first_index - part.capacity;
  }
  return 1;
}
