// The sum of sparse blocks, reduced to its largest elements. An entry finds its place among all
// entries by bisection in the other ranks' indices, and the first entry of an index computes the
// sum. merge_select.cu selects the largest sums.
#include "custom_ops/core/gpu/divider.cuh"
#include "custom_ops/core/gpu/merge.cuh"
#include "custom_ops/core/gpu/records.cuh"
#include "custom_ops/core/gpu/runs.cuh"

namespace redsync {
namespace gpu {
namespace {

// Returns the record position of a count (field 0), an index or a value (field slot + 1).
__device__ inline int64_t Position(const MergeItem& item, int64_t rank, int64_t field, bool value) {
  return item.at + 2 * (rank * (item.blocks.slots + 1) + field) + value;
}
__host__ __device__ inline int64_t Positions(const RedsyncGpuBlocks& blocks, int64_t ranks) {
  return 2 * ranks * (blocks.slots + 1);
}

// Clears the outputs and records the first error in the blocks.
__global__ void __launch_bounds__(kThreads) Begin(REDSYNC_PARAMETER MergeGroup call) {
  const int item_index = call.Find();
  const MergeItem& item = call.items[item_index];
  const RedsyncGpuBlocks& b = item.blocks;
  const uint32_t first = call.Block(item_index) * kThreads + threadIdx.x;
  const uint32_t stride = call.Blocks(item_index) * kThreads;
  for (uint32_t i = first; i < sizeof(MergeState) / sizeof(uint32_t); i += stride) {
    reinterpret_cast<uint32_t*>(item.state)[i] = 0;
  }
  for (int64_t i = first; i < b.k; i += stride) {
    b.kept_indices[i] = 0;
    b.kept_values[i] = 0;
  }
  for (int64_t rank = first; rank < call.ranks; rank += stride) {
    const int32_t count = call.Count(item, rank);
    if (count < 0 || count > b.slots) Report(call.record, Position(item, rank, 0, false));
  }
  for (int64_t i = first; i < item.entries; i += stride) {
    item.sums[i] = 0;
    b.dropped_indices[i] = 0;
    b.dropped_values[i] = 0;
    const int64_t rank = i / b.slots, slot = i % b.slots;
    if (slot >= call.Count(item, rank)) continue;
    const bool ascends = slot == 0 || b.indices[i] > b.indices[i - 1];
    if (!ascends || b.indices[i] >= b.size) {
      Report(call.record, Position(item, rank, slot + 1, false));
    }
    if (!IsFinite(__float_as_int(b.values[i]))) {
      Report(call.record, Position(item, rank, slot + 1, true));
    }
  }
}

// Reads the value at the position in the record, if it belongs to this tensor.
__device__ inline void ReadBad(const MergeGroup& call, const MergeItem& item) {
  const int64_t at = static_cast<int64_t>(call.record->position) - item.at;
  if (at < 0 || at >= Positions(item.blocks, call.ranks)) return;
  const int64_t rank = at / 2 / (item.blocks.slots + 1), field = at / 2 % (item.blocks.slots + 1);
  const int64_t entry = rank * item.blocks.slots + field - 1;
  call.record->value = field == 0    ? call.Count(item, rank)
                       : at % 2 == 0 ? int64_t{item.blocks.indices[entry]}
                                     : __float_as_int(item.blocks.values[entry]);
}

// Places an entry among those of all ranks, by index and rank; the first entry of an index has the
// sum.
__device__ inline void AddEntry(const MergeGroup& call, const MergeItem& item, uint32_t entry) {
  const RedsyncGpuBlocks& b = item.blocks;
  const auto slots = static_cast<uint32_t>(b.slots);
  const int64_t rank = entry / slots, slot = entry % slots;
  if (slot >= call.Count(item, rank)) return;
  const uint32_t index = b.indices[entry];
  uint32_t place = 0;
  float sum = 0;
  for (int64_t other = 0; other < call.ranks; ++other) {
    const int64_t row = other * b.slots;
    const Run run = {b.indices + row, 0, static_cast<uint32_t>(call.Count(item, other))};
    const uint32_t at = other == rank ? static_cast<uint32_t>(slot) : LowerBound(run, index);
    const bool is_present = at < run.end && run.indices[at] == index;
    if (is_present && other < rank) return;  // That rank's entry has the sum.
    place += at;
    if (is_present) sum += b.values[row + at];
  }
  const uint64_t bits = static_cast<uint32_t>(__float_as_int(sum));
  if (sum != 0) item.sums[place] = static_cast<uint64_t>(index) << 32 | bits;
}

__global__ void __launch_bounds__(kThreads) AddEntries(REDSYNC_PARAMETER MergeGroup call) {
  const int item_index = call.Find();
  const MergeItem& item = call.items[item_index];
  if (!IsClear(*call.record)) {
    if (call.Block(item_index) == 0 && threadIdx.x == 0) ReadBad(call, item);
    return;
  }
  const uint32_t begin = call.Block(item_index) * kMergeTile;
  for (uint32_t i = begin + threadIdx.x; i < begin + kMergeTile && i < item.entries;
       i += kThreads) {
    AddEntry(call, item, i);
  }
}

// Creates the items in order; a copy starts again at the first one.
struct ItemMaker {
  const RedsyncGpuMerge& call;
  Divider divider;
  int64_t at = 0;

  MergeItem operator()(int64_t i) {
    MergeItem item = {};
    item.blocks = call.tensors[i];
    item.counts = call.counts + i;
    item.kept = call.kept_counts + i;
    item.dropped = call.dropped_counts + i;
    item.entries = static_cast<uint32_t>(call.ranks * item.blocks.slots);
    item.at = at;
    at += Positions(item.blocks, call.ranks);
    item.state = divider.Take<MergeState>(1);
    item.sums = divider.Take<uint64_t>(item.entries);
    item.before = divider.Take<Tally<3>>(item.slices());
    return item;
  }
};

bool IsValid(const RedsyncGpuMerge& call) {
  if (call.ranks < 0 || call.ranks > 65535) return false;
  for (int64_t i = 0; i < call.count; ++i) {
    const RedsyncGpuBlocks& b = call.tensors[i];
    if (b.slots < 0 || b.slots > INT32_MAX || call.ranks * b.slots > INT32_MAX || b.size < 0 ||
        b.size > UINT32_MAX || b.k < 0 || b.k > INT32_MAX) {
      return false;
    }
  }
  return true;
}

}  // namespace
}  // namespace gpu
}  // namespace redsync

using namespace redsync::gpu;  // NOLINT: the C interface below is this file's other half.

int64_t redsync_gpu_merge_scratch_bytes(const RedsyncGpuMerge* call) {
  if (!IsValid(*call)) return -1;
  ItemMaker make = {*call, Divider(nullptr)};
  for (int64_t i = 0; i < call->count; ++i) make(i);
  return make.divider.bytes();
}

int redsync_gpu_merge(const RedsyncGpuMerge* call, RedsyncGpuRecord* record, void* scratch,
                      int64_t scratch_bytes, void* stream_pointer) {
  const int64_t bytes = redsync_gpu_merge_scratch_bytes(call);
  if (bytes < 0) return REDSYNC_GPU_INVALID_ARGUMENT;
  if (scratch_bytes < bytes) return REDSYNC_GPU_SCRATCH_TOO_SMALL;
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  ClearRecord(record, stream);
  MergeGroup group = {};
  group.ranks = call->ranks;
  group.tensors = call->count;
  group.record = record;
  const ItemMaker make = {*call, Divider(scratch)};
  auto tiles = [](const MergeItem& item) { return CeilDiv(item.entries, kMergeTile); };
  ForGroups(group, call->count, make, tiles, [&](const MergeGroup& part, uint32_t blocks) {
    REDSYNC_LAUNCH(Begin, blocks, kThreads, stream, part);
    REDSYNC_LAUNCH(AddEntries, blocks, kThreads, stream, part);
    LaunchMergeSelect(part, blocks, stream);
  });
  return LaunchStatus();
}

int redsync_gpu_explain_merge(const RedsyncGpuMerge* call, const RedsyncGpuRecord* record,
                              RedsyncGpuCodecError* error) {
  if (IsClear(*record)) return 0;
  int64_t tensor = 0, at = static_cast<int64_t>(record->position);
  for (; at >= Positions(call->tensors[tensor], call->ranks); ++tensor) {
    at -= Positions(call->tensors[tensor], call->ranks);
  }
  const RedsyncGpuBlocks& b = call->tensors[tensor];
  const int64_t rank = at / 2 / (b.slots + 1), slot = at / 2 % (b.slots + 1) - 1;
  const int64_t index = ReportedIndex(record->value, b.size);
  const bool in_range = index >= 0 && index < b.size;
  if (slot < 0) {
    const double count = static_cast<double>(record->value);
    *error = {"count", rank, tensor, 0, count, nullptr, b.slots};
  } else if (at % 2 == 1) {
    *error = {"value", rank, tensor, slot, FloatOf(record->value), "finite", 0};
  } else {
    const double value = static_cast<double>(index);
    *error = {"index", rank, tensor, slot, value, in_range ? "ascending" : nullptr, b.size - 1};
  }
  return 1;
}
