// The positions in Bloom filters: first a map of the positives, then a prefix sum over its tiles,
// which gives the slots of the positions.
#include "custom_ops/core/gpu/bits.cuh"
#include "custom_ops/core/gpu/bloom.cuh"
#include "custom_ops/core/gpu/divider.cuh"
#include "custom_ops/core/gpu/groups.cuh"
#include "custom_ops/core/gpu/records.cuh"

namespace redsync {
namespace gpu {
namespace {

constexpr uint32_t kTile = 32 * kThreads;  // Positions of a block: one word of the map per thread.

struct Item {
  RedsyncGpuFilter filter;
  int32_t* counts;   // [ranks, tensors], from this tensor on.
  int64_t offset;    // Offset of the filter, in words.
  uint32_t* ticket;  // [ranks], see IsLastBlock().
  Tally<1>* before;  // [ranks, tiles]: positives in a tile, later before it.
  uint32_t* map;     // [ranks, words]: whether a position is positive.

  __host__ __device__ uint32_t tiles() const {
    return static_cast<uint32_t>((filter.size + kTile - 1) / kTile);
  }
  __host__ __device__ uint32_t words() const { return tiles() * kThreads; }
};

struct Call : Group<Item, 36> {
  const int32_t *filters, *seed;
  int64_t words, tensors;
};

__device__ inline bool Holds(const Call& call, const Item& item, const uint32_t* filter,
                             uint32_t position) {
  Probes probes(position, call.seed, item.filter.words);
  for (int64_t t = 0; t < item.filter.hashes; ++t) {
    const uint32_t bit = probes.Next();
    if ((filter[bit / 32] >> (bit % 32) & 1) == 0) return false;
  }
  return true;
}

__global__ void __launch_bounds__(kThreads) Look(REDSYNC_PARAMETER Call call) {
  const int item_index = call.Find();
  const Item& item = call.items[item_index];
  const auto* filter =
      reinterpret_cast<const uint32_t*>(call.filters + blockIdx.y * call.words + item.offset);
  const uint32_t tile = call.Block(item_index), rank = blockIdx.y;
  uint32_t* map = item.map + int64_t{rank} * item.words();
  Tally<1>* before = item.before + int64_t{rank} * item.tiles();
  uint32_t positives = 0;
  for (uint32_t i = 0; i < kTile && tile < item.tiles(); i += kThreads) {
    const uint32_t position = tile * kTile + i + threadIdx.x;
    const bool held = position < item.filter.size && Holds(call, item, filter, position);
    const uint32_t ballot = __ballot_sync(kAllLanes, held);
    if (Lane() == 0) map[position / 32] = ballot;
    positives += held;
  }
  positives = BlockReduce(positives, Add());
  if (threadIdx.x == 0 && tile < item.tiles()) before[tile] = {{positives}};
  if (!IsLastBlock(item.ticket + rank, call.Blocks(item_index))) return;
  const Tally<1> total = ScanTallies(before, item.tiles());
  const auto slots = static_cast<uint32_t>(item.filter.slots);
  const uint32_t listed = total.at[0] < slots ? total.at[0] : slots;
  if (threadIdx.x == 0) item.counts[rank * call.tensors] = static_cast<int32_t>(listed);
}

__global__ void __launch_bounds__(kThreads) List(REDSYNC_PARAMETER Call call) {
  const int item_index = call.Find();
  const Item& item = call.items[item_index];
  const uint32_t tile = call.Block(item_index), rank = blockIdx.y;
  const auto slots = static_cast<uint32_t>(item.filter.slots);
  uint32_t* positions = item.filter.out + rank * item.filter.slots;
  const auto listed = static_cast<uint32_t>(item.counts[rank * call.tensors]);
  const uint32_t stride = call.Blocks(item_index) * kThreads;
  for (uint32_t i = listed + tile * kThreads + threadIdx.x; i < slots; i += stride)
    positions[i] = 0;
  if (tile >= item.tiles()) return;
  const uint32_t word = tile * kThreads + threadIdx.x;
  const uint32_t bits = item.map[int64_t{rank} * item.words() + word];
  uint32_t all;
  const uint32_t before = BlockScan(static_cast<uint32_t>(__popc(bits)), &all);
  ListBits(bits, word, item.before[int64_t{rank} * item.tiles() + tile].at[0] + before, slots,
           positions);
}

// Creates the items in order; a copy starts again at the first one.
struct ItemMaker {
  const RedsyncGpuBloomQuery& call;
  Divider divider;
  uint32_t* tickets;
  int64_t offset = 0;

  ItemMaker(const RedsyncGpuBloomQuery& call, void* scratch)
      : call(call), divider(scratch), tickets(divider.Take<uint32_t>(call.ranks * call.count)) {}

  Item operator()(int64_t i) {
    Item item = {};
    item.filter = call.tensors[i];
    item.counts = call.counts + i;
    item.offset = offset;
    item.ticket = tickets + i * call.ranks;
    item.before = divider.Take<Tally<1>>(call.ranks * item.tiles());
    item.map = divider.Take<uint32_t>(call.ranks * item.words());
    offset += item.filter.words;
    return item;
  }
};

}  // namespace
}  // namespace gpu
}  // namespace redsync

using namespace redsync::gpu;  // NOLINT: the C interface below is this file's other half.

int64_t redsync_gpu_bloom_query_scratch_bytes(const RedsyncGpuBloomQuery* call) {
  const int64_t words = FilterWords(call->tensors, call->count);
  if (words < 0 || call->words != words || call->ranks < 0 || call->ranks > 65535) return -1;
  ItemMaker make(*call, nullptr);
  for (int64_t i = 0; i < call->count; ++i) make(i);
  return make.divider.bytes();
}

int redsync_gpu_bloom_query(const RedsyncGpuBloomQuery* call, void* scratch, int64_t scratch_bytes,
                            void* stream_pointer) {
  const int64_t bytes = redsync_gpu_bloom_query_scratch_bytes(call);
  if (bytes < 0) return REDSYNC_GPU_INVALID_ARGUMENT;
  if (scratch_bytes < bytes) return REDSYNC_GPU_SCRATCH_TOO_SMALL;
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  if (call->ranks == 0) return LaunchStatus();
  const ItemMaker make(*call, scratch);
  cudaMemsetAsync(make.tickets, 0, call->ranks * call->count * sizeof(uint32_t), stream);
  Call group = {};
  group.filters = call->filters;
  group.seed = call->seed;
  group.words = call->words;
  group.tensors = call->count;
  auto tiles = [](const Item& item) { return item.tiles(); };
  ForGroups(group, call->count, make, tiles, [&](const Call& part, uint32_t blocks) {
    const dim3 grid(blocks, static_cast<uint32_t>(call->ranks));
    REDSYNC_LAUNCH(Look, grid, kThreads, stream, part);
    REDSYNC_LAUNCH(List, grid, kThreads, stream, part);
  });
  return LaunchStatus();
}
