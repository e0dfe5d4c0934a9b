// Bloom filters of positions: bits are set atomically, in any order.
#include "custom_ops/core/gpu/bloom.cuh"
#include "custom_ops/core/gpu/groups.cuh"
#include "custom_ops/core/gpu/records.cuh"

namespace redsync {
namespace gpu {
namespace {

constexpr uint32_t kTile = 1024;  // Positions of a block.

struct Item {
  RedsyncGpuFilter filter;
  const int32_t* count;
  int64_t offset;  // Offset of the filter, in words.
  int64_t at;      // Record position of the count; the positions follow.
};

struct Call : Group<Item, 40> {
  const int32_t* seed;
  uint32_t* filters;
  RedsyncGpuRecord* record;
};

__global__ void __launch_bounds__(kThreads) Insert(REDSYNC_PARAMETER Call call) {
  const int item_index = call.Find();
  const Item& item = call.items[item_index];
  const RedsyncGpuFilter& filter = item.filter;
  const int64_t count = *item.count;
  if (count < 0 || count > filter.slots) {
    if (threadIdx.x == 0) Report(call.record, item.at);
    return;
  }
  const int64_t begin = int64_t{call.Block(item_index)} * kTile;
  const int64_t end = begin + kTile < count ? begin + kTile : count;
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    const uint32_t position = filter.in[i];
    if (position >= filter.size) {
      Report(call.record, item.at + 1 + i);
      continue;
    }
    Probes probes(position, call.seed, filter.words);
    for (int64_t t = 0; t < filter.hashes; ++t) {
      const uint32_t bit = probes.Next();
      atomicOr(&call.filters[item.offset + bit / 32], 1u << (bit % 32));
    }
  }
}

// Reads the value at the position in the record, if it belongs to these tensors.
__global__ void ReadBad(REDSYNC_PARAMETER Call call) {
  if (threadIdx.x != 0 || IsClear(*call.record)) return;
  for (int i = 0; i < call.count; ++i) {
    const Item& item = call.items[i];
    const int64_t at = static_cast<int64_t>(call.record->position) - item.at;
    if (at < 0 || at > item.filter.slots) continue;
    call.record->value = at == 0 ? *item.count : int64_t{item.filter.in[at - 1]};
  }
}

}  // namespace
}  // namespace gpu
}  // namespace redsync

using namespace redsync::gpu;  // NOLINT: the C interface below is this file's other half.

int redsync_gpu_bloom_build(const RedsyncGpuBloomBuild* call, RedsyncGpuRecord* record,
                            void* stream_pointer) {
  const int64_t words = FilterWords(call->tensors, call->count);
  if (words < 0) return REDSYNC_GPU_INVALID_ARGUMENT;
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  ClearRecord(record, stream);
  cudaMemsetAsync(call->filters, 0, words * sizeof(int32_t), stream);
  Call group = {};
  group.seed = call->seed;
  group.filters = reinterpret_cast<uint32_t*>(call->filters);
  group.record = record;
  Item next = {};
  next.count = call->counts;
  auto make = [&](int64_t i) {
    Item item = next;
    item.filter = call->tensors[i];
    ++next.count;
    next.offset += item.filter.words;
    next.at += 1 + item.filter.slots;
    return item;
  };
  auto tiles = [](const Item& item) { return CeilDiv(item.filter.slots, kTile); };
  ForGroups(group, call->count, make, tiles, [&](const Call& part, uint32_t blocks) {
    REDSYNC_LAUNCH(Insert, blocks, kThreads, stream, part);
    REDSYNC_LAUNCH(ReadBad, 1, 32, stream, part);
  });
  return LaunchStatus();
}

int redsync_gpu_explain_bloom_build(const RedsyncGpuBloomBuild* call,
                                    const RedsyncGpuRecord* record, RedsyncGpuCodecError* error) {
  if (IsClear(*record)) return 0;
  int64_t tensor = 0, at = static_cast<int64_t>(record->position);
  for (; at > call->tensors[tensor].slots; ++tensor) at -= 1 + call->tensors[tensor].slots;
  const RedsyncGpuFilter& f = call->tensors[tensor];
  const double count = static_cast<double>(record->value);
  *error = {"count", -1, tensor, 0, count, nullptr, f.slots};
  if (at > 0) {
    const double index = static_cast<double>(ReportedIndex(record->value, f.size));
    *error = {"index", -1, tensor, at - 1, index, nullptr, f.size - 1};
  }
  return 1;
}
