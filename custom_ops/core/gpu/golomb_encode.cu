// Golomb codes of ascending positions. A prefix sum of the lengths says where a code begins. All
// bits are ones at first, so that a code has only its zero and its low bits to write, however long
// its run of ones is.
#include "custom_ops/core/gpu/block.cuh"
#include "custom_ops/core/gpu/divider.cuh"
#include "custom_ops/core/gpu/golomb_stream.cuh"
#include "custom_ops/core/gpu/groups.cuh"
#include "custom_ops/core/gpu/records.cuh"

namespace redsync {
namespace gpu {
namespace {

constexpr uint32_t kTile = 2048;  // Positions of a block.

struct Item {
  const uint32_t* positions;
  const int32_t* count;
  int32_t* part;     // Of the message: [count, bits, words..].
  int64_t at;        // For the record: of the count; the positions follow.
  uint32_t* ticket;  // See IsLastBlock().
  Tally<1>* before;  // [tiles]: bits of a tile, and then before it.
  uint32_t size, slots, words;
  int rice;

  __host__ __device__ uint32_t tiles() const { return (slots + kTile - 1) / kTile; }
  __device__ uint32_t* code() const { return reinterpret_cast<uint32_t*>(part + 2); }
  // 0 if the count is wrong.
  __device__ uint32_t used() const {
    return *count < 0 || static_cast<uint32_t>(*count) > slots ? 0 : *count;
  }
  // The gap before a position, less one.
  __device__ uint32_t Rest(uint32_t slot) const {
    return positions[slot] - (slot == 0 ? 0 : positions[slot - 1] + 1);
  }
  __device__ uint32_t Length(uint32_t slot) const { return (Rest(slot) >> rice) + 1 + rice; }
};

struct Call : Group<Item, 48> {
  RedsyncGpuRecord* record;
};

// Measures the codes, checks the positions, and fills the words with ones.
__global__ void __launch_bounds__(kThreads) Measure(REDSYNC_PARAMETER Call call) {
  const int which = call.Find();
  const Item& item = call.items[which];
  const uint32_t first = call.Block(which) * kThreads + threadIdx.x;
  for (uint32_t w = first; w < item.words; w += call.Blocks(which) * kThreads) {
    item.code()[w] = UINT32_MAX;
  }
  const int32_t count = *item.count;
  if (first == 0 && (count < 0 || static_cast<uint32_t>(count) > item.slots)) {
    Report(call.record, item.at);
  }
  const uint32_t tile = call.Block(which), begin = tile * kTile;
  const uint32_t end = begin + kTile < item.used() ? begin + kTile : item.used();
  uint32_t bits = 0;
  for (uint32_t i = begin + threadIdx.x; i < end; i += kThreads) {
    const uint32_t position = item.positions[i];
    const bool ascends = i == 0 || position > item.positions[i - 1];
    if (!ascends || position >= item.size) Report(call.record, item.at + 1 + i);
    bits += item.Length(i);
  }
  bits = BlockReduce(bits, Add());
  if (threadIdx.x == 0 && tile < item.tiles()) item.before[tile] = {{bits}};
  if (!IsLastBlock(item.ticket, call.Blocks(which))) return;
  const Tally<1> total = ScanTallies(item.before, item.tiles());
  if (threadIdx.x != 0) return;
  item.part[0] = count;
  item.part[1] = static_cast<int32_t>(total.at[0]);
}

// Clears up to 32 bits from `at` on, of words that other threads clear bits of, too.
__device__ inline void ClearBits(uint32_t* words, uint32_t at, uint32_t bits) {
  const uint64_t shifted = uint64_t{bits} << (at % 32);
  const auto low = static_cast<uint32_t>(shifted), high = static_cast<uint32_t>(shifted >> 32);
  atomicAnd(&words[at / 32], ~low);
  if (high != 0) atomicAnd(&words[at / 32 + 1], ~high);
}

__global__ void __launch_bounds__(kThreads) Write(REDSYNC_PARAMETER Call call) {
  const int which = call.Find();
  const Item& item = call.items[which];
  if (!IsClear(*call.record)) {
    const int64_t at = static_cast<int64_t>(call.record->position) - item.at;
    if (call.Block(which) == 0 && threadIdx.x == 0 && at >= 0 && at <= item.slots) {
      call.record->value = at == 0 ? *item.count : int64_t{item.positions[at - 1]};
    }
    return;
  }
  const auto total = static_cast<uint32_t>(item.part[1]);
  const uint32_t stride = call.Blocks(which) * kThreads;
  for (uint32_t w = total / 32 + call.Block(which) * kThreads + threadIdx.x; w < item.words;
       w += stride) {
    if (w == total / 32) {
      atomicAnd(&item.code()[w], (1u << (total % 32)) - 1);
    } else {
      item.code()[w] = 0;
    }
  }
  const uint32_t tile = call.Block(which), used = item.used();
  uint32_t at = tile < item.tiles() ? item.before[tile].at[0] : 0;
  for (uint32_t i = tile * kTile; i < (tile + 1) * kTile && i < used; i += kThreads) {
    const uint32_t slot = i + threadIdx.x;
    uint32_t bits;
    const uint32_t start = at + BlockScan(slot < used ? item.Length(slot) : 0u, &bits);
    at += bits;
    if (slot >= used) continue;
    const uint32_t rest = item.Rest(slot), low = rest & ((1u << item.rice) - 1);
    const uint32_t zeros = 1 | (low ^ ((1u << item.rice) - 1)) << 1;
    ClearBits(item.code(), start + (rest >> item.rice), zeros);
  }
}

// Makes the items, in their order; a copy begins anew.
struct Maker {
  const RedsyncGpuGolombEncode& call;
  Divider divider;
  uint32_t* tickets;
  int64_t at, offset;

  Maker(const RedsyncGpuGolombEncode& call, void* scratch)
      : call(call),
        divider(scratch),
        tickets(divider.Take<uint32_t>(call.count)),
        at(0),
        offset(0) {}

  Item operator()(int64_t i) {
    const RedsyncGpuPositions& from = call.tensors[i];
    Item item = {};
    item.positions = from.in;
    item.count = call.counts + i;
    item.part = call.message + offset;
    item.at = at;
    item.ticket = tickets + i;
    item.size = static_cast<uint32_t>(from.size);
    item.slots = static_cast<uint32_t>(from.slots);
    item.words = static_cast<uint32_t>(GolombWords(from));
    item.rice = static_cast<int>(from.rice);
    item.before = divider.Take<Tally<1>>(item.tiles());
    offset += 2 + item.words;
    at += 1 + from.slots;
    return item;
  }
};

}  // namespace
}  // namespace gpu
}  // namespace redsync

using namespace redsync::gpu;  // NOLINT: the C interface below is this file's other half.

int64_t redsync_gpu_golomb_words(const RedsyncGpuPositions* tensors, int64_t count) {
  int64_t words = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t more = GolombWords(tensors[i]);
    if (more < 0) return -1;
    words += 2 + more;
  }
  return words;
}

int64_t redsync_gpu_golomb_encode_scratch_bytes(const RedsyncGpuGolombEncode* call) {
  if (redsync_gpu_golomb_words(call->tensors, call->count) < 0) return -1;
  Maker make(*call, nullptr);
  for (int64_t i = 0; i < call->count; ++i) make(i);
  return make.divider.bytes();
}

int redsync_gpu_golomb_encode(const RedsyncGpuGolombEncode* call, RedsyncGpuRecord* record,
                              void* scratch, int64_t scratch_bytes, void* stream_pointer) {
  const int64_t bytes = redsync_gpu_golomb_encode_scratch_bytes(call);
  if (bytes < 0) return REDSYNC_GPU_INVALID_ARGUMENT;
  if (scratch_bytes < bytes) return REDSYNC_GPU_SCRATCH_TOO_SMALL;
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  const Maker make(*call, scratch);
  ClearRecord(record, stream);
  cudaMemsetAsync(make.tickets, 0, call->count * sizeof(uint32_t), stream);
  Call group = {};
  group.record = record;
  auto tiles = [](const Item& item) { return item.tiles(); };
  ForGroups(group, call->count, make, tiles, [&](const Call& part, uint32_t blocks) {
    REDSYNC_LAUNCH(Measure, blocks, kThreads, stream, part);
    REDSYNC_LAUNCH(Write, blocks, kThreads, stream, part);
  });
  return LaunchStatus();
}

int redsync_gpu_explain_golomb_encode(const RedsyncGpuGolombEncode* call,
                                      const RedsyncGpuRecord* record, RedsyncGpuCodecError* error) {
  if (IsClear(*record)) return 0;
  int64_t tensor = 0, at = static_cast<int64_t>(record->position);
  for (; at > call->tensors[tensor].slots; ++tensor) at -= 1 + call->tensors[tensor].slots;
  const RedsyncGpuPositions& p = call->tensors[tensor];
  const int64_t index = Shown(record->value, p.size);
  const bool in_range = index >= 0 && index < p.size;
  if (at == 0) {
    const double count = static_cast<double>(record->value);
    *error = {"count", -1, tensor, 0, count, nullptr, p.slots};
  } else {
    const double value = static_cast<double>(index);
    *error = {"index", -1, tensor, at - 1, value, in_range ? "ascending" : nullptr, p.size - 1};
  }
  return 1;
}
