// Encodes selected elements: Golomb codes of the positions of each stream, conditional means as
// magnitudes, and a code for each value. The sums are integers, so they do not depend on the order;
// see core/cpu/levels.h.
#include "custom_ops/core/gpu/groups.cuh"
#include "custom_ops/core/gpu/records.cuh"
#include "custom_ops/core/gpu/topk_plan.cuh"

namespace redsync {
namespace gpu {
namespace {

// Statistics of a tensor's magnitudes; initially zero.
struct Magnitudes {
  uint32_t ticket;  // See IsLastBlock().
  int32_t largest;  // Bits of the largest magnitude.
  uint32_t before;  // Selected elements of earlier tensors in the stream.
  float means[kMaxCells];
  Wide sums[kMaxCells], members[kMaxCells];
};

struct Item {
  const int32_t* part;  // [count, index * slots, value * slots]
  float* residual;
  Magnitudes* magnitudes;
  uint32_t* positions;  // Positions of the stream.
  int32_t* total;       // Number of positions of the stream.
  uint32_t* codes;      // [slots]
  uint32_t* values;     // Levels or halves in the message.
  uint32_t slots, start;

  __device__ uint32_t count() const { return static_cast<uint32_t>(part[0]); }
  __device__ uint32_t index(uint32_t i) const {
    return static_cast<uint32_t>(part[IndicesAt(false) + i]);
  }
  __device__ int32_t value(uint32_t i) const { return part[ValuesAt(false, slots) + i]; }
  __device__ void StoreCodingError(uint32_t i, float decoded) const {
    residual[index(i)] = __int_as_float(value(i)) - decoded;
  }
};

struct Call : Group<Item, 32> {
  int cells;  // Number of cells of the last level.
};

__device__ inline double PowerOfTwo(int exponent) {
  const int64_t bits = (int64_t{1023} + exponent) << 52;
  return __longlong_as_double(bits);
}

// Computes the offsets of the tensors' positions in the streams. One lane per tensor.
__global__ void __launch_bounds__(32) Order(REDSYNC_PARAMETER Call call) {
  const int item_index = static_cast<int>(threadIdx.x);
  const bool is_there = item_index < call.count;
  const Item& item = call.items[is_there ? item_index : 0];
  uint32_t before = is_there ? static_cast<uint32_t>(*item.total) : 0;
  for (int other = 0; other < call.count; ++other) {
    const Item& from = call.items[other];
    if (other < item_index && from.total == item.total) before += from.count();
  }
  __syncwarp();  // All lanes have read the totals.
  if (!is_there) return;
  item.magnitudes->before = before;
  atomicAdd(item.total, static_cast<int32_t>(item.count()));
}

// Copies positions to the stream, and finds the largest magnitude.
__global__ void __launch_bounds__(kThreads) Collect(REDSYNC_PARAMETER Call call) {
  const int item_index = call.Find();
  const Item& item = call.items[item_index];
  const uint32_t begin = call.Block(item_index) * kSlotTile, count = item.count();
  int32_t largest = 0;
  for (uint32_t i = begin + threadIdx.x; i < begin + kSlotTile && i < item.slots; i += kThreads) {
    item.codes[i] = 0;
    if (i >= count) continue;
    item.positions[item.magnitudes->before + i] = item.start + item.index(i);
    largest = Max()(largest, item.value(i) & INT32_MAX);
  }
  largest = BlockReduce(largest, Max());
  if (threadIdx.x == 0) atomicMax(&item.magnitudes->largest, largest);
}

// Divides each cell at its mean, except at the first level, and finds the means of the new cells.
__global__ void __launch_bounds__(kThreads) FindMeans(REDSYNC_PARAMETER Call call, int level) {
  const int item_index = call.Find();
  const Item& item = call.items[item_index];
  Magnitudes& m = *item.magnitudes;
  const int cells = 1 << level;
  const uint32_t begin = call.Block(item_index) * kSlotTile, count = item.count();
  const int shift = 157 - (m.largest >> 23);  // Magnitudes are below 2^(31 - shift).
  const double unit = PowerOfTwo(shift);
  Wide sums[kMaxCells] = {}, members[kMaxCells] = {};
  for (uint32_t i = begin + threadIdx.x; i < begin + kSlotTile && i < count; i += kThreads) {
    const float magnitude = __int_as_float(item.value(i) & INT32_MAX);
    auto cell = static_cast<int>(item.codes[i]);
    if (level > 0) {
      cell = 2 * cell + (magnitude > m.means[cell] ? 1 : 0);
      item.codes[i] = static_cast<uint32_t>(cell);
    }
    const auto integer = static_cast<Wide>(static_cast<double>(magnitude) * unit);
#pragma unroll
    for (int c = 0; c < kMaxCells; ++c) {
      sums[c] += cell == c ? integer : 0;
      members[c] += cell == c;
    }
  }
#pragma unroll
  for (int c = 0; c < kMaxCells; ++c) {
    if (c >= cells) break;
    const Wide sum = BlockReduce(sums[c], Add()), of = BlockReduce(members[c], Add());
    if (threadIdx.x == 0 && of != 0) {
      atomicAdd(&m.sums[c], sum);
      atomicAdd(&m.members[c], of);
    }
  }
  if (!IsLastBlock(&m.ticket, call.Blocks(item_index))) return;
  const int c = static_cast<int>(threadIdx.x);
  if (c >= cells) return;
  const Wide of = m.members[c] > 0 ? m.members[c] : 1;
  const double mean = static_cast<double>(m.sums[c]) / static_cast<double>(of);
  m.means[c] = static_cast<float>(mean * PowerOfTwo(-shift));
  m.sums[c] = m.members[c] = 0;
  if (cells == call.cells) item.values[c] = static_cast<uint32_t>(__float_as_int(m.means[c]));
}

// Adds the signs to the codes, and stores the errors in the residuals.
__global__ void __launch_bounds__(kThreads) Sign(REDSYNC_PARAMETER Call call) {
  const int item_index = call.Find();
  const Item& item = call.items[item_index];
  const uint32_t begin = call.Block(item_index) * kSlotTile, count = item.count();
  for (uint32_t i = begin + threadIdx.x; i < begin + kSlotTile && i < count; i += kThreads) {
    const uint32_t cell = item.codes[i], negative = __int_as_float(item.value(i)) < 0;
    const float level = item.magnitudes->means[cell];
    item.codes[i] = 2 * cell + negative;
    item.StoreCodingError(i, negative ? -level : level);
  }
}

// Rounds to the nearest bfloat16, ties to even; two values per thread.
__global__ void __launch_bounds__(kThreads) Round(REDSYNC_PARAMETER Call call) {
  const int item_index = call.Find();
  const Item& item = call.items[item_index];
  const uint32_t begin = call.Block(item_index) * kSlotTile, count = item.count();
  for (uint32_t i = begin + 2 * threadIdx.x; i < begin + kSlotTile && i < item.slots;
       i += 2 * kThreads) {
    uint32_t word = 0;
    for (uint32_t j = i; j < i + 2 && j < count; ++j) {
      const auto bits = static_cast<uint32_t>(item.value(j));
      const uint32_t half = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
      word |= half << (16 * (j - i));
      item.StoreCodingError(j, __int_as_float(static_cast<int32_t>(half << 16)));
    }
    item.values[i / 2] = word;
  }
}

// Writes the flag, or clears the message.
__global__ void __launch_bounds__(kThreads)
    Seal(const int32_t* plain, int32_t* message, int64_t words) {
  const bool is_finite = plain[0] == 1;
  const int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (first == 0) message[0] = is_finite;
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = 1 + first; i < words && !is_finite; i += stride) message[i] = 0;
}

// Divides scratch memory; zero-initialized parts come first.
struct ItemMaker {
  const RedsyncGpuEncodeTopK& call;
  TopKPlan plan;
  Divider divider;
  int32_t* totals;
  Magnitudes* magnitudes;
  int64_t zeros;  // Bytes of the zero-initialized parts.
  RedsyncGpuRecord* record;
  uint32_t* codes;
  RedsyncGpuGolombEncode golomb;
  int64_t golomb_bytes;
  char* golomb_scratch;

  ItemMaker(const RedsyncGpuEncodeTopK& call, void* scratch)
      : call(call), plan(call.format), divider(scratch) {
    if (plan.words < 0) return;
    totals = divider.Take<int32_t>(call.format.streams);
    magnitudes = divider.Take<Magnitudes>(call.format.count);
    zeros = divider.bytes();
    record = divider.Take<RedsyncGpuRecord>(1);
    codes = divider.Take<uint32_t>(plan.slots);
    for (RedsyncGpuPositions& stream : plan.streams) {
      stream.out = divider.Take<uint32_t>(stream.slots);
      stream.in = stream.out;
    }
    golomb = {plan.streams.data(), call.format.streams, totals, call.message + kHeaderWords};
    golomb_bytes = redsync_gpu_golomb_encode_scratch_bytes(&golomb);
    golomb_scratch = divider.Take<char>(golomb_bytes);
  }

  Item operator()(int64_t i) {
    const RedsyncGpuTopKTensor& from = call.format.tensors[i];
    Item item = {};
    item.part = call.plain + plan.parts[i];
    item.residual = from.residual;
    item.magnitudes = magnitudes + i;
    item.positions = plan.streams[from.stream].out;
    item.total = totals + from.stream;
    item.codes = codes + plan.firsts[i];
    item.slots = static_cast<uint32_t>(from.slots);
    item.start = static_cast<uint32_t>(plan.starts[i]);
    item.values = reinterpret_cast<uint32_t*>(call.message + plan.values[i]);
    return item;
  }
};

}  // namespace
}  // namespace gpu
}  // namespace redsync

using namespace redsync::gpu;  // NOLINT: the C interface below is this file's other half.

int64_t redsync_gpu_topk_words(const RedsyncGpuTopKFormat* format) {
  return TopKPlan(*format).words;
}

int64_t redsync_gpu_plain_words(const RedsyncGpuTopKFormat* format) {
  const TopKPlan plan(*format);
  return plan.words < 0 ? -1 : plan.plain_words;
}

int64_t redsync_gpu_encode_topk_scratch_bytes(const RedsyncGpuEncodeTopK* call) {
  const ItemMaker make(*call, nullptr);
  return make.plan.words < 0 ? -1 : make.divider.bytes();
}

int redsync_gpu_encode_topk(const RedsyncGpuEncodeTopK* call, void* scratch, int64_t scratch_bytes,
                            void* stream_pointer) {
  ItemMaker make(*call, scratch);
  if (make.plan.words < 0) return REDSYNC_GPU_INVALID_ARGUMENT;
  if (scratch_bytes < make.divider.bytes()) return REDSYNC_GPU_SCRATCH_TOO_SMALL;
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  const auto bits = static_cast<int>(call->format.value_bits);
  cudaMemsetAsync(scratch, 0, make.zeros, stream);
  Call group = {};
  group.cells = static_cast<int>(make.plan.cells);
  auto tiles = [](const Item& item) { return CeilDiv(item.slots, kSlotTile); };
  ForGroups(group, call->format.count, make, tiles, [&](const Call& part, uint32_t blocks) {
    REDSYNC_LAUNCH(Order, 1, 32, stream, part);
    REDSYNC_LAUNCH(Collect, blocks, kThreads, stream, part);
    if (bits == kHalfBits) {
      REDSYNC_LAUNCH(Round, blocks, kThreads, stream, part);
      return;
    }
    for (int level = 0; level < bits; ++level) {
      REDSYNC_LAUNCH(FindMeans, blocks, kThreads, stream, part, level);
    }
    REDSYNC_LAUNCH(Sign, blocks, kThreads, stream, part);
  });
  if (bits != kHalfBits) {
    auto* codes = reinterpret_cast<uint32_t*>(call->message + make.plan.codes_at);
    LaunchPack({1, make.plan.slots, bits, make.codes, codes}, Plain(), stream);
  }
  // Positions from a selection are valid, so the record is not checked.
  const int coded = redsync_gpu_golomb_encode(&make.golomb, make.record, make.golomb_scratch,
                                              make.golomb_bytes, stream_pointer);
  if (coded != REDSYNC_GPU_OK) return coded;
  REDSYNC_LAUNCH(Seal, GridFor(make.plan.words), kThreads, stream, call->plain, call->message,
                 make.plan.words);
  return LaunchStatus();
}
