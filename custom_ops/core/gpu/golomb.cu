// Golomb codes of ascending positions: the packed low bits of all gaps, then a bitmap with the high
// bits of each gap in unary. Encoding needs prefix sums of bits in the bitmap; decoding needs
// prefix sums of its ones and of the low bits.
#include "custom_ops/core/gpu/bits.cuh"
#include "custom_ops/core/gpu/compression_api.h"
#include "custom_ops/core/gpu/groups.cuh"
#include "custom_ops/core/gpu/records.cuh"

namespace redsync {
namespace gpu {
namespace {

constexpr uint32_t kTile = 2048;  // Slots of a block.
// Words of low bits and bitmap, which together have less than 2^31 bits.
constexpr int64_t kMaxWords = INT32_MAX / 32;

// A tensor's part of a message: [count, low words.., bitmap words..].
struct Format {
  uint32_t size, slots, low_words, bitmap_words;
  int rice;

  __host__ __device__ int64_t words() const { return int64_t{1} + low_words + bitmap_words; }
};

// Returns words that suffice for any positions.
int64_t BitmapWords(const RedsyncGpuPositions& p) {
  return CeilDiv(p.slots + ((p.size - p.slots) >> p.rice), 32);
}

bool IsValid(const RedsyncGpuPositions& p) {
  return p.size >= 0 && p.size <= UINT32_MAX && p.slots >= 0 && p.slots <= p.size &&
         p.slots <= INT32_MAX && p.rice >= 0 && p.rice <= kMaxRice &&
         PackedWords(p.slots, p.rice) + BitmapWords(p) <= kMaxWords;
}

Format FormatOf(const RedsyncGpuPositions& p) {
  return {static_cast<uint32_t>(p.size), static_cast<uint32_t>(p.slots),
          static_cast<uint32_t>(PackedWords(p.slots, p.rice)),
          static_cast<uint32_t>(BitmapWords(p)), static_cast<int>(p.rice)};
}

struct EncodeItem {
  Format format;
  const uint32_t* positions;
  const int32_t* count;
  int32_t* part;     // The tensor's part of the message.
  int64_t at;        // Record position of the count; the positions follow.
  uint32_t* ticket;  // See IsLastBlock().
  Tally<1>* before;  // [tiles]: bits of a tile in the bitmap, later before it.

  int64_t tiles() const { return std::max<int64_t>(CeilDiv(format.slots, kTile), 1); }
  __device__ uint32_t* low() const { return reinterpret_cast<uint32_t*>(part + 1); }
  __device__ uint32_t* bitmap() const { return low() + format.low_words; }
  // Returns the count; 0 if it is out of range.
  __device__ uint32_t used() const {
    const auto received = static_cast<uint32_t>(*count);
    return received <= format.slots ? received : 0;
  }
  // Returns the gap before a position minus 1.
  __device__ uint32_t Rest(int64_t slot) const {
    return positions[slot] - (slot == 0 ? 0 : positions[slot - 1] + 1);
  }
  __device__ uint32_t Length(uint32_t slot) const { return (Rest(slot) >> format.rice) + 1; }
};

struct Encoding : Group<EncodeItem, 48> {
  RedsyncGpuRecord* record;
};

// Packs low bits, clears the bitmap, checks the positions, and counts their bits in the bitmap.
__global__ void __launch_bounds__(kThreads) MeasureGaps(REDSYNC_PARAMETER Encoding call) {
  const int item_index = call.Find();
  const EncodeItem& item = call.items[item_index];
  const uint32_t tile = call.Block(item_index), tiles = call.Blocks(item_index), used = item.used();
  const uint32_t first = tile * kThreads + threadIdx.x, stride = tiles * kThreads;
  if (first == 0) {
    item.part[0] = *item.count;
    if (*item.count != static_cast<int64_t>(used)) Report(call.record, item.at);
  }
  auto rest = [&](int64_t slot) { return item.Rest(slot); };
  for (uint32_t w = first; w < item.format.low_words; w += stride) {
    item.low()[w] = PackedWord(w, used, item.format.rice, rest);
  }
  for (uint32_t w = first; w < item.format.bitmap_words; w += stride) item.bitmap()[w] = 0;
  uint32_t bits = 0;
  const uint32_t end = (tile + 1) * kTile < used ? (tile + 1) * kTile : used;
  for (uint32_t i = tile * kTile + threadIdx.x; i < end; i += kThreads) {
    const uint32_t position = item.positions[i];
    const bool ascends = i == 0 || position > item.positions[i - 1];
    if (!ascends || position >= item.format.size) Report(call.record, item.at + 1 + i);
    bits += item.Length(i);
  }
  bits = BlockReduce(bits, Add());
  if (threadIdx.x == 0) item.before[tile] = {{bits}};
  if (IsLastBlock(item.ticket, tiles)) ScanTallies(item.before, tiles);
}

// Sets the ones, or reads the value at the position in the record.
__global__ void __launch_bounds__(kThreads) MarkGaps(REDSYNC_PARAMETER Encoding call) {
  const int item_index = call.Find();
  const EncodeItem& item = call.items[item_index];
  const uint32_t tile = call.Block(item_index), used = item.used();
  if (!IsClear(*call.record)) {
    const int64_t at = static_cast<int64_t>(call.record->position) - item.at;
    if (tile == 0 && threadIdx.x == 0 && at >= 0 && at <= item.format.slots) {
      call.record->value = at == 0 ? *item.count : int64_t{item.positions[at - 1]};
    }
    return;
  }
  uint32_t at = item.before[tile].at[0];
  for (uint32_t i = tile * kTile; i < (tile + 1) * kTile && i < used; i += kThreads) {
    const uint32_t slot = i + threadIdx.x, length = slot < used ? item.Length(slot) : 0;
    uint32_t bits;
    const uint32_t one = at + BlockScan(length, &bits) + length - 1;
    if (slot < used) atomicOr(&item.bitmap()[one / 32], 1u << (one % 32));
    at += bits;
  }
}

// Makes the items, in their order; a copy begins anew.
struct EncodeMaker {
  const RedsyncGpuGolombEncode& call;
  Divider divider;
  uint32_t* tickets;
  int64_t at = 0, offset = 0;

  EncodeMaker(const RedsyncGpuGolombEncode& call, void* scratch)
      : call(call), divider(scratch), tickets(divider.Take<uint32_t>(call.count)) {}

  EncodeItem operator()(int64_t i) {
    const RedsyncGpuPositions& from = call.tensors[i];
    EncodeItem item = {};
    item.format = FormatOf(from);
    item.positions = from.in;
    item.count = call.counts + i;
    item.part = call.message + offset;
    item.at = at;
    item.ticket = tickets + i;
    item.before = divider.Take<Tally<1>>(item.tiles());
    offset += item.format.words();
    at += 1 + from.slots;
    return item;
  }
};

// Number of record positions of a tensor: the count, the ones, and one for every slot.
__host__ __device__ inline int64_t Places(int64_t slots) { return 2 + slots; }

struct DecodeItem {
  Format format;
  const int32_t* part;     // The tensor's part of the first message.
  uint32_t* positions;     // [ranks, slots]
  int32_t* counts;         // [ranks, tensors], from this tensor on.
  int64_t at;              // First record position, see Places().
  uint32_t* ticket;        // [ranks], see IsLastBlock().
  Wide* bad;               // [ranks]: the malformed value; all ones if there is none.
  Tally<2, Wide>* before;  // [ranks, tiles]: ones and low bits of a tile, later before it.

  // One block per tile, with kThreads words of the bitmap and kTile slots.
  __host__ __device__ int64_t tiles() const {
    const int64_t of_words = (int64_t{format.bitmap_words} + kThreads - 1) / kThreads;
    const int64_t of_slots = (int64_t{format.slots} + kTile - 1) / kTile;
    const int64_t most = of_words > of_slots ? of_words : of_slots;
    return most > 1 ? most : 1;
  }
};

struct Decoding : Group<DecodeItem, 40> {
  int64_t stride;  // Distance between messages, in words.
  int64_t places;  // Record positions of a rank.
  int64_t tensors;
  RedsyncGpuRecord* record;
};

// A rank's part, and the output of its decoding.
struct Received {
  const Format& format;
  const int32_t* part;
  uint32_t* positions;
  int32_t* count;  // 0 if the part's count is out of range, or differs from the number of ones.
  Tally<2, Wide>* before;

  __device__ Received(const Decoding& call, const DecodeItem& item)
      : format(item.format),
        part(item.part + blockIdx.y * call.stride),
        positions(item.positions + int64_t{blockIdx.y} * format.slots),
        count(item.counts + blockIdx.y * call.tensors),
        before(item.before + blockIdx.y * item.tiles()) {}

  __device__ const uint32_t* low() const { return reinterpret_cast<const uint32_t*>(part + 1); }
  __device__ Wide Low(uint32_t slot) const {
    return BitsAt(low(), int64_t{slot} * format.rice, format.rice);
  }
  __device__ uint32_t Word(uint32_t i) const {
    return i < format.bitmap_words ? low()[format.low_words + i] : 0;
  }
};

// Counts ones and sums low bits; the last block checks the number of ones.
__global__ void __launch_bounds__(kThreads) CountOnes(REDSYNC_PARAMETER Decoding call) {
  const int item_index = call.Find();
  const DecodeItem& item = call.items[item_index];
  const Received received(call, item);
  const uint32_t tile = call.Block(item_index), tiles = call.Blocks(item_index);
  const int32_t count = received.part[0];
  const bool is_count = static_cast<uint32_t>(count) <= item.format.slots;
  const uint32_t used = is_count ? static_cast<uint32_t>(count) : 0;
  Wide ones = __popc(received.Word(tile * kThreads + threadIdx.x)), low = 0;
  const uint32_t end = (tile + 1) * kTile < used ? (tile + 1) * kTile : used;
  for (uint32_t i = tile * kTile + threadIdx.x; i < end; i += kThreads) low += received.Low(i);
  ones = BlockReduce(ones, Add());
  low = BlockReduce(low, Add());
  if (threadIdx.x == 0) received.before[tile] = {{ones, low}};
  if (!IsLastBlock(item.ticket + blockIdx.y, tiles)) return;
  ones = ScanTallies(received.before, tiles).at[0];
  if (threadIdx.x != 0) return;
  const bool is_valid = is_count && ones == used;
  *received.count = is_valid ? count : 0;
  item.bad[blockIdx.y] = is_valid ? UINT64_MAX : is_count ? ones : static_cast<Wide>(count);
  if (!is_valid) {
    Report(call.record, blockIdx.y * call.places + item.at + (is_count ? 1 : 0));
  }
}

// Writes the position of the one of each slot.
__global__ void __launch_bounds__(kThreads) ListOnes(REDSYNC_PARAMETER Decoding call) {
  const int item_index = call.Find();
  const Received received(call, call.items[item_index]);
  const uint32_t tile = call.Block(item_index), first = tile * kThreads + threadIdx.x;
  const uint32_t word = received.Word(first);
  uint32_t all;
  const uint32_t before = BlockScan(static_cast<uint32_t>(__popc(word)), &all);
  ListBits(word, first, static_cast<uint32_t>(received.before[tile].at[0]) + before,
           static_cast<uint32_t>(*received.count), received.positions);
}

// Converts positions of ones to positions. Those out of range become 2^32 - 1, so that all ascend.
__global__ void __launch_bounds__(kThreads) AddLowBits(REDSYNC_PARAMETER Decoding call) {
  const int item_index = call.Find();
  const DecodeItem& item = call.items[item_index];
  const Received received(call, item);
  const uint32_t tile = call.Block(item_index), slots = item.format.slots;
  const auto count = static_cast<uint32_t>(*received.count);
  Wide before = received.before[tile].at[1];
  for (uint32_t i = tile * kTile; i < (tile + 1) * kTile && i < slots; i += kThreads) {
    const uint32_t slot = i + threadIdx.x;
    const Wide low = slot < count ? received.Low(slot) : 0;
    Wide all;
    Wide position = before + BlockScan(low, &all) + low;
    before += all;
    if (slot >= count) {
      if (slot < slots) received.positions[slot] = 0;
      continue;
    }
    position += (Wide{received.positions[slot] - slot} << item.format.rice) + slot;
    const bool is_inside = position < item.format.size;
    received.positions[slot] = is_inside ? static_cast<uint32_t>(position) : UINT32_MAX;
    if (is_inside) continue;
    // Positions ascend, so the first one out of range is in the lowest slot.
    Report(call.record, blockIdx.y * call.places + item.at + 2 + slot);
    atomicMin(&item.bad[blockIdx.y], position);
  }
}

// Reads the value at the position in the record, if it belongs to these tensors.
__global__ void ReadMalformed(REDSYNC_PARAMETER Decoding call) {
  if (threadIdx.x != 0 || IsClear(*call.record)) return;
  const auto place = static_cast<int64_t>(call.record->position);
  for (int i = 0; i < call.count; ++i) {
    const DecodeItem& item = call.items[i];
    const int64_t at = place % call.places - item.at;
    if (at < 0 || at >= Places(item.format.slots)) continue;
    call.record->value = static_cast<int64_t>(item.bad[place / call.places]);
  }
}

// Makes the items, in their order; a copy begins anew.
struct DecodeMaker {
  const RedsyncGpuGolombDecode& call;
  Divider divider;
  uint32_t* tickets;
  Wide* bad;
  int64_t at = 0, offset = 0;

  DecodeMaker(const RedsyncGpuGolombDecode& call, void* scratch)
      : call(call),
        divider(scratch),
        tickets(divider.Take<uint32_t>(call.ranks * call.count)),
        bad(divider.Take<Wide>(call.ranks * call.count)) {}

  DecodeItem operator()(int64_t i) {
    const RedsyncGpuPositions& from = call.tensors[i];
    DecodeItem item = {};
    item.format = FormatOf(from);
    item.part = call.messages + offset;
    item.positions = from.out;
    item.counts = call.counts + i;
    item.at = at;
    item.ticket = tickets + i * call.ranks;
    item.bad = bad + i * call.ranks;
    item.before = divider.Take<Tally<2, Wide>>(call.ranks * item.tiles());
    offset += item.format.words();
    at += Places(from.slots);
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
    if (!IsValid(tensors[i])) return -1;
    words += FormatOf(tensors[i]).words();
  }
  return words;
}

int64_t redsync_gpu_golomb_encode_scratch_bytes(const RedsyncGpuGolombEncode* call) {
  if (redsync_gpu_golomb_words(call->tensors, call->count) < 0) return -1;
  EncodeMaker make(*call, nullptr);
  for (int64_t i = 0; i < call->count; ++i) make(i);
  return make.divider.bytes();
}

int redsync_gpu_golomb_encode(const RedsyncGpuGolombEncode* call, RedsyncGpuRecord* record,
                              void* scratch, int64_t scratch_bytes, void* stream_pointer) {
  const int64_t bytes = redsync_gpu_golomb_encode_scratch_bytes(call);
  if (bytes < 0) return REDSYNC_GPU_INVALID_ARGUMENT;
  if (scratch_bytes < bytes) return REDSYNC_GPU_SCRATCH_TOO_SMALL;
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  const EncodeMaker make(*call, scratch);
  ClearRecord(record, stream);
  cudaMemsetAsync(make.tickets, 0, call->count * sizeof(uint32_t), stream);
  Encoding group = {};
  group.record = record;
  auto tiles = [](const EncodeItem& item) { return item.tiles(); };
  ForGroups(group, call->count, make, tiles, [&](const Encoding& part, uint32_t blocks) {
    REDSYNC_LAUNCH(MeasureGaps, blocks, kThreads, stream, part);
    REDSYNC_LAUNCH(MarkGaps, blocks, kThreads, stream, part);
  });
  return LaunchStatus();
}

int redsync_gpu_explain_golomb_encode(const RedsyncGpuGolombEncode* call,
                                      const RedsyncGpuRecord* record, RedsyncGpuCodecError* error) {
  if (IsClear(*record)) return 0;
  int64_t tensor = 0, at = static_cast<int64_t>(record->position);
  for (; at > call->tensors[tensor].slots; ++tensor) at -= 1 + call->tensors[tensor].slots;
  const RedsyncGpuPositions& p = call->tensors[tensor];
  const int64_t index = ReportedIndex(record->value, p.size);
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

int64_t redsync_gpu_golomb_decode_scratch_bytes(const RedsyncGpuGolombDecode* call) {
  const int64_t words = redsync_gpu_golomb_words(call->tensors, call->count);
  if (words < 0 || call->words != words || call->ranks < 0 || call->ranks > 65535) return -1;
  DecodeMaker make(*call, nullptr);
  for (int64_t i = 0; i < call->count; ++i) make(i);
  return make.divider.bytes();
}

int redsync_gpu_golomb_decode(const RedsyncGpuGolombDecode* call, RedsyncGpuRecord* record,
                              void* scratch, int64_t scratch_bytes, void* stream_pointer) {
  const int64_t bytes = redsync_gpu_golomb_decode_scratch_bytes(call);
  if (bytes < 0) return REDSYNC_GPU_INVALID_ARGUMENT;
  if (scratch_bytes < bytes) return REDSYNC_GPU_SCRATCH_TOO_SMALL;
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  ClearRecord(record, stream);
  if (call->ranks == 0) return LaunchStatus();
  const DecodeMaker make(*call, scratch);
  cudaMemsetAsync(make.tickets, 0, call->ranks * call->count * sizeof(uint32_t), stream);
  Decoding group = {};
  group.stride = call->stride;
  for (int64_t i = 0; i < call->count; ++i) group.places += Places(call->tensors[i].slots);
  group.tensors = call->count;
  group.record = record;
  auto tiles = [](const DecodeItem& item) { return item.tiles(); };
  ForGroups(group, call->count, make, tiles, [&](const Decoding& part, uint32_t blocks) {
    const dim3 grid(blocks, static_cast<uint32_t>(call->ranks));
    REDSYNC_LAUNCH(CountOnes, grid, kThreads, stream, part);
    REDSYNC_LAUNCH(ListOnes, grid, kThreads, stream, part);
    REDSYNC_LAUNCH(AddLowBits, grid, kThreads, stream, part);
    REDSYNC_LAUNCH(ReadMalformed, 1, 32, stream, part);
  });
  return LaunchStatus();
}

int redsync_gpu_explain_golomb_decode(const RedsyncGpuGolombDecode* call,
                                      const RedsyncGpuRecord* record, RedsyncGpuCodecError* error) {
  if (IsClear(*record)) return 0;
  int64_t places = 0, tensor = 0;
  for (int64_t i = 0; i < call->count; ++i) places += Places(call->tensors[i].slots);
  const auto position = static_cast<int64_t>(record->position);
  const int64_t rank = position / places;
  int64_t at = position % places;
  for (; at >= Places(call->tensors[tensor].slots); ++tensor) {
    at -= Places(call->tensors[tensor].slots);
  }
  const RedsyncGpuPositions& p = call->tensors[tensor];
  const double value = static_cast<double>(record->value);
  if (at == 0) {
    *error = {"count", rank, tensor, 0, value, nullptr, p.slots};
  } else if (at == 1) {
    *error = {"number of ones", rank, tensor, 0, value, "as many as positions", 0};
  } else {
    *error = {"index", rank, tensor, at - 2, value, nullptr, p.size - 1};
  }
  return 1;
}
