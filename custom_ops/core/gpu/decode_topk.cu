// Decodes messages of top-k elements: Golomb codes give the positions of a stream, a bisection
// separates those of each tensor, and the codes of values index the tensor's levels.
#include "custom_ops/core/gpu/groups.cuh"
#include "custom_ops/core/gpu/records.cuh"
#include "custom_ops/core/gpu/runs.cuh"
#include "custom_ops/core/gpu/topk_plan.cuh"

namespace redsync {
namespace gpu {
namespace {

struct Item {
  const uint32_t* positions;  // Positions of the stream, [ranks, of_stream].
  const int32_t* counts;      // Counts of the streams, [ranks, streams], from this stream on.
  int64_t part;               // Offset of the part in the plain message.
  int64_t values;             // Offset of levels or halves in the coded message.
  uint32_t of_stream, slots, start, size;
  uint32_t first;  // First slot of the tensor among those of all tensors.
};

struct Call : Group<Item, 48> {
  const int32_t* messages;
  int32_t* plain;
  int64_t words, plain_words, codes_at, streams;
  int bits;
};

// Returns the bits of the value in a slot.
__device__ inline int32_t ValueAt(const Call& call, const Item& item, const int32_t* row,
                                  uint32_t i) {
  const int32_t* values = row + item.values;
  if (call.bits == kHalfBits) {
    const auto word = static_cast<uint32_t>(values[i / 2]);
    return static_cast<int32_t>((i % 2 == 0 ? word : word >> 16) << 16);
  }
  const auto* codes = reinterpret_cast<const uint32_t*>(row + call.codes_at);
  const uint32_t code = BitsAt(codes, (int64_t{item.first} + i) * call.bits, call.bits);
  return values[code >> 1] ^ static_cast<int32_t>(code << 31);
}

// One block per tile of a tensor's slots, for each rank.
__global__ void __launch_bounds__(kThreads) Separate(REDSYNC_PARAMETER Call call) {
  const int item_index = call.Find();
  const Item& item = call.items[item_index];
  const int64_t rank = blockIdx.y;
  const int32_t* row = call.messages + rank * call.words;
  int32_t* plain = call.plain + rank * call.plain_words;
  int32_t* part = plain + item.part;
  const auto used = static_cast<uint32_t>(item.counts[rank * call.streams]);
  const Run run = {item.positions + rank * item.of_stream, 0, used};
  __shared__ Bounds bounds;
  const int64_t start = item.start;
  FindBounds(start, start + item.size, 1, &bounds, [&](int) { return run; });
  const uint32_t count = bounds.end - bounds.begin, tile = call.Block(item_index) * kSlotTile;
  if (tile == 0 && threadIdx.x == 0) {
    part[0] = static_cast<int32_t>(count);
    if (item.part == kHeaderWords) plain[0] = row[0];
  }
  for (uint32_t i = tile + threadIdx.x; i < tile + kSlotTile && i < item.slots; i += kThreads) {
    const bool is_used = i < count;
    part[IndicesAt(false) + i] =
        is_used ? static_cast<int32_t>(run.indices[bounds.begin + i] - item.start) : 0;
    part[ValuesAt(false, item.slots) + i] = is_used ? ValueAt(call, item, row, i) : 0;
  }
}

// Divides scratch memory.
struct ItemMaker {
  const RedsyncGpuDecodeTopK& call;
  TopKPlan plan;
  Divider divider;
  int32_t* counts;
  RedsyncGpuGolombDecode golomb;
  int64_t golomb_bytes;
  char* golomb_scratch;

  ItemMaker(const RedsyncGpuDecodeTopK& call, void* scratch)
      : call(call), plan(call.format), divider(scratch) {
    if (!is_valid()) return;
    const int64_t streams = call.format.streams;
    counts = divider.Take<int32_t>(call.ranks * streams);
    for (RedsyncGpuPositions& stream : plan.streams) {
      stream.out = divider.Take<uint32_t>(call.ranks * stream.slots);
    }
    const int64_t golomb_words = redsync_gpu_golomb_words(plan.streams.data(), streams);
    golomb = {plan.streams.data(), streams, call.messages + kHeaderWords, call.ranks, call.words,
              golomb_words,        counts};
    golomb_bytes = redsync_gpu_golomb_decode_scratch_bytes(&golomb);
    golomb_scratch = divider.Take<char>(golomb_bytes);
  }

  bool is_valid() const {
    return plan.words >= 0 && call.words == plan.words && call.ranks >= 0 && call.ranks <= 65535;
  }

  Item operator()(int64_t i) {
    const RedsyncGpuTopKTensor& from = call.format.tensors[i];
    const RedsyncGpuPositions& stream = plan.streams[from.stream];
    Item item = {};
    item.positions = stream.out;
    item.counts = counts + from.stream;
    item.part = plan.parts[i];
    item.of_stream = static_cast<uint32_t>(stream.slots);
    item.slots = static_cast<uint32_t>(from.slots);
    item.start = static_cast<uint32_t>(plan.starts[i]);
    item.size = static_cast<uint32_t>(from.size);
    item.first = static_cast<uint32_t>(plan.firsts[i]);
    item.values = plan.values[i];
    return item;
  }
};

}  // namespace
}  // namespace gpu
}  // namespace redsync

using namespace redsync::gpu;  // NOLINT: the C interface below is this file's other half.

int64_t redsync_gpu_decode_topk_scratch_bytes(const RedsyncGpuDecodeTopK* call) {
  const ItemMaker make(*call, nullptr);
  return make.is_valid() ? make.divider.bytes() : -1;
}

int redsync_gpu_decode_topk(const RedsyncGpuDecodeTopK* call, RedsyncGpuRecord* record,
                            void* scratch, int64_t scratch_bytes, void* stream_pointer) {
  ItemMaker make(*call, scratch);
  if (!make.is_valid()) return REDSYNC_GPU_INVALID_ARGUMENT;
  if (scratch_bytes < make.divider.bytes()) return REDSYNC_GPU_SCRATCH_TOO_SMALL;
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  const int decoded = redsync_gpu_golomb_decode(&make.golomb, record, make.golomb_scratch,
                                                make.golomb_bytes, stream_pointer);
  if (decoded != REDSYNC_GPU_OK || call->ranks == 0) return decoded;
  Call group = {};
  group.messages = call->messages;
  group.plain = call->plain;
  group.words = call->words;
  group.plain_words = make.plan.plain_words;
  group.codes_at = make.plan.codes_at;
  group.streams = call->format.streams;
  group.bits = static_cast<int>(call->format.value_bits);
  auto tiles = [](const Item& item) { return CeilDiv(item.slots, kSlotTile); };
  ForGroups(group, call->format.count, make, tiles, [&](const Call& part, uint32_t blocks) {
    const dim3 grid(blocks, static_cast<uint32_t>(call->ranks));
    REDSYNC_LAUNCH(Separate, grid, kThreads, stream, part);
  });
  return LaunchStatus();
}

int redsync_gpu_explain_decode_topk(const RedsyncGpuDecodeTopK* call,
                                    const RedsyncGpuRecord* record, RedsyncGpuCodecError* error) {
  const TopKPlan plan(call->format);
  RedsyncGpuGolombDecode golomb = {};
  golomb.tensors = plan.streams.data();
  golomb.count = call->format.streams;
  const int found = redsync_gpu_explain_golomb_decode(&golomb, record, error);
  if (found) error->tensor = -1;  // The positions of several tensors may share a stream.
  return found;
}
