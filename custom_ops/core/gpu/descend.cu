// Descent along positions and values. Indices may repeat, for example between ranks, and entries
// must be applied in their order. So the entries are cut into ascending runs, which have no
// repetitions.
#include "custom_ops/core/gpu/block.cuh"
#include "custom_ops/core/gpu/c_api.h"
#include "custom_ops/core/gpu/records.cuh"
#include "custom_ops/core/gpu/runs.cuh"

namespace redsync {
namespace gpu {
namespace {

constexpr uint32_t kMaxRuns = kLoneThreads;  // With more runs, entries are applied one by one.

struct Table {
  uint32_t begins, ends;  // Numbers of run starts and ends.
  uint32_t begin[kMaxRuns], end[kMaxRuns];
};

// Unused slots of messages have the value 0, which is a no-op, so runs exclude them.
__device__ inline bool IsUsed(const RedsyncGpuDescend& call, int64_t i) {
  return call.values[i] != 0;
}

__global__ void __launch_bounds__(kThreads)
    FindRuns(REDSYNC_PARAMETER RedsyncGpuDescend call, RedsyncGpuRecord* record, Table* table) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= call.entries) return;
  const uint32_t index = call.indices[i];
  if (index >= call.size) Report(record, i);
  if (!IsUsed(call, i)) return;
  if (i == 0 || !IsUsed(call, i - 1) || call.indices[i - 1] >= index) {
    const uint32_t n = atomicAdd(&table->begins, 1u);
    if (n < kMaxRuns) table->begin[n] = static_cast<uint32_t>(i);
  }
  if (i + 1 == call.entries || !IsUsed(call, i + 1) || call.indices[i + 1] <= index) {
    const uint32_t n = atomicAdd(&table->ends, 1u);
    if (n < kMaxRuns) table->end[n] = static_cast<uint32_t>(i + 1);
  }
}

// Sorts the runs, which were found in any order.
__global__ void __launch_bounds__(kLoneThreads)
    SortRuns(REDSYNC_PARAMETER RedsyncGpuDescend call, RedsyncGpuRecord* record, Table* table) {
  if (!IsClear(*record)) {
    if (threadIdx.x == 0) record->value = ReportedIndex(call.indices[record->position], call.size);
    return;
  }
  const uint32_t runs = table->begins;
  if (runs > kMaxRuns) return;
  uint32_t begin = 0, end = 0, begin_rank = 0, end_rank = 0;
  if (threadIdx.x < runs) {
    begin = table->begin[threadIdx.x];
    end = table->end[threadIdx.x];
    for (uint32_t i = 0; i < runs; ++i) {
      begin_rank += table->begin[i] < begin;
      end_rank += table->end[i] < end;
    }
  }
  __syncthreads();
  if (threadIdx.x < runs) {
    table->begin[begin_rank] = begin;
    table->end[end_rank] = end;
  }
}

// One span of the variable per block.
__global__ void __launch_bounds__(kThreads)
    Apply(REDSYNC_PARAMETER RedsyncGpuDescend call, const RedsyncGpuRecord* record,
          const Table* table) {
  if (!IsClear(*record)) return;
  const float rate = *call.learning_rate;
  if (table->begins > kMaxRuns) {
    for (int64_t i = 0; i < call.entries && blockIdx.x == 0 && threadIdx.x == 0; ++i) {
      if (IsUsed(call, i)) call.variable[call.indices[i]] -= rate * call.values[i];
    }
    return;
  }
  const int64_t begin = blockIdx.x * kSpan;
  const int64_t end = begin + kSpan < call.size ? begin + kSpan : call.size;
  __shared__ Bounds bounds[kRunsAtOnce];
  for (uint32_t first = 0; first < table->begins; first += kRunsAtOnce) {
    const uint32_t left = table->begins - first;
    const int runs = left < kRunsAtOnce ? static_cast<int>(left) : kRunsAtOnce;
    FindBounds(begin, end, runs, bounds, [&](int run) {
      return Run{call.indices, table->begin[first + run], table->end[first + run]};
    });
    auto load = [&](int, uint32_t i) { return Entry{call.indices[i], call.values[i]}; };
    ForEntries(bounds, runs, load,
               [&](const Entry& entry) { call.variable[entry.index] -= rate * entry.value; });
  }
}

}  // namespace
}  // namespace gpu
}  // namespace redsync

using namespace redsync::gpu;  // NOLINT: the C interface below is this file's other half.

int64_t redsync_gpu_descend_scratch_bytes(void) { return sizeof(Table); }

int redsync_gpu_descend(const RedsyncGpuDescend* call, RedsyncGpuRecord* record, void* scratch,
                        int64_t scratch_bytes, void* stream_pointer) {
  if (call->entries < 0 || call->entries > INT32_MAX || call->size < 0) {
    return REDSYNC_GPU_INVALID_ARGUMENT;
  }
  if (scratch_bytes < redsync_gpu_descend_scratch_bytes()) return REDSYNC_GPU_SCRATCH_TOO_SMALL;
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  Table* table = static_cast<Table*>(scratch);
  ClearRecord(record, stream);
  cudaMemsetAsync(table, 0, sizeof(*table), stream);
  const auto blocks = static_cast<uint32_t>(CeilDiv(call->entries, kThreads));
  const auto spans = static_cast<uint32_t>(CeilDiv(call->size, kSpan));
  if (blocks > 0) REDSYNC_LAUNCH(FindRuns, blocks, kThreads, stream, *call, record, table);
  REDSYNC_LAUNCH(SortRuns, 1, kLoneThreads, stream, *call, record, table);
  if (spans > 0) REDSYNC_LAUNCH(Apply, spans, kThreads, stream, *call, record, table);
  return LaunchStatus();
}
