// Positions from Golomb codes. Where a code begins depends on all before it, but there are only
// rice + 1 states that a reader can be in: within a run of ones, or with some low bits to go. So a
// chunk of code is read from every state at once, one a lane, and a walk over the chunks, one step
// each, says which of the states it was.
#include "custom_ops/core/gpu/block.cuh"
#include "custom_ops/core/gpu/divider.cuh"
#include "custom_ops/core/gpu/golomb_decode.cuh"

namespace redsync {
namespace gpu {
namespace {

constexpr uint32_t kAhead = 8;  // Chunks that the walk loads at once.

// The result of reading some chunks: the state behind them, and the end of the last code in them.
struct Stretch {
  Start start;
  uint32_t end;
};

// A warp walks over chunks [first, last) of a rank; every lane begins where its `at` says. Calls
// visit(chunk, start) where a chunk begins.
template <class Visit>
__device__ inline Stretch WalkOver(const DecodeItem& item, uint32_t first, uint32_t last,
                                   Stretch at, Visit visit) {
  const uint32_t states = static_cast<uint32_t>(item.rice) + 1;
  const Step* steps = item.steps + int64_t{blockIdx.y} * item.chunks() * states;
  for (uint32_t c = first; c < last; c += kAhead) {
    Step ahead[kAhead];
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) {
      const bool there = c + i < last && Lane() < states;
      ahead[i] = there ? steps[int64_t{c + i} * states + Lane()] : Step{0, 0, 0, 0};
    }
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) {
      if (c + i >= last) break;
      visit(c + i, at.start);
      const int from = at.start.state;
      at.start.position += __shfl_sync(kAllLanes, ahead[i].advance, from);
      at.start.slot += __shfl_sync(kAllLanes, ahead[i].codes, from);
      at.start.state = __shfl_sync(kAllLanes, static_cast<int>(ahead[i].state), from);
      const int end = __shfl_sync(kAllLanes, static_cast<int>(ahead[i].end), from);
      if (end != 0) at.end = (c + i) * kChunkBits + end;
    }
  }
  return at;
}

// One block: finds where the chunks begin, and whether all bits belong to the codes. Each warp has
// a share of the chunks; it walks over it from every state, one a lane, then from the right one.
__device__ inline void Walk(const DecodeGroup& call, const DecodeItem& item,
                            const ReceivedStream& code) {
  __shared__ Stretch of_state[kWarps][32], of_warp[kWarps];
  const Range share = Part(code.chunks(), Warp(), kWarps);
  const uint32_t last = share.begin + share.count;
  const Stretch any = {{0, 0, static_cast<int32_t>(Lane())}, 0};
  of_state[Warp()][Lane()] = WalkOver(item, share.begin, last, any, [](uint32_t, const Start&) {});
  __syncthreads();
  Stretch at = {{-1, 0, 0}, 0};
  for (unsigned w = 0; w < Warp(); ++w) {
    const Stretch& walked = of_state[w][at.start.state];
    at.start = {at.start.position + walked.start.position, at.start.slot + walked.start.slot,
                walked.start.state};
  }
  Start* starts = item.starts + int64_t{blockIdx.y} * item.chunks();
  at = WalkOver(item, share.begin, last, at, [&](uint32_t chunk, const Start& start) {
    if (Lane() == 0) starts[chunk] = start;
  });
  if (Lane() == 0) of_warp[Warp()] = at;
  __syncthreads();
  if (threadIdx.x != 0) return;
  uint32_t end = 0;  // Of the last code.
  for (const Stretch& walked : of_warp) end = walked.end != 0 ? walked.end : end;
  const uint32_t codes = of_warp[kWarps - 1].start.slot;
  if (codes < code.count) {
    ReportKind(call, item, codes, kTooFew);
  } else if (codes > code.count || end != code.bits) {
    ReportKind(call, item, code.count, kTooMany);
  }
}

// Chunks that a warp reads, from all states each.
__host__ __device__ inline uint32_t ChunksOfWarp(const DecodeItem& item) {
  return 32 / (static_cast<uint32_t>(item.rice) + 1);
}

// A lane a chunk and state; the last block walks.
__global__ void __launch_bounds__(kThreads) ReadChunks(REDSYNC_PARAMETER DecodeGroup call) {
  const int which = call.Find();
  const DecodeItem& item = call.items[which];
  const ReceivedStream code(call, item);
  if (!code.valid) {
    const bool bad_count = code.count > item.slots;
    if (threadIdx.x == 0) {
      Report(call.record, blockIdx.y * call.positions + item.at + (bad_count ? 0 : 1));
    }
    return;
  }
  const uint32_t states = static_cast<uint32_t>(item.rice) + 1, together = ChunksOfWarp(item);
  const uint32_t mine = Lane() / states, state = Lane() % states;
  const uint32_t chunk = (call.Block(which) * kWarps + Warp()) * together + mine;
  if (mine < together && chunk < code.chunks()) {
    const int64_t place = int64_t{blockIdx.y} * item.chunks() + chunk;
    item.steps[place * states + state] =
        Read(code, chunk, item.rice, static_cast<int>(state), [](int64_t) { return true; });
  }
  if (!IsLastBlock(item.ticket + blockIdx.y, call.Blocks(which))) return;
  Walk(call, item, code);
}

// A thread a chunk.
__global__ void __launch_bounds__(kThreads) WritePositions(REDSYNC_PARAMETER DecodeGroup call) {
  const int which = call.Find();
  const DecodeItem& item = call.items[which];
  const ReceivedStream code(call, item);
  if (!code.valid) return;
  const int64_t rank = blockIdx.y;
  uint32_t* positions = item.positions + rank * item.slots;
  const uint32_t first = call.Block(which) * kThreads + threadIdx.x;
  if (first == 0) item.counts[rank * call.tensors] = static_cast<int32_t>(code.count);
  const uint32_t stride = call.Blocks(which) * kThreads;
  for (uint32_t i = code.count + first; i < item.slots; i += stride) positions[i] = 0;
  if (first >= code.chunks()) return;
  const Start start = item.starts[rank * item.chunks() + first];
  uint32_t slot = start.slot;
  Read(code, first, item.rice, start.state, [&](int64_t advance) {
    if (slot >= code.count) return false;
    const int64_t position = start.position + advance;
    if (position < item.size) {
      positions[slot++] = static_cast<uint32_t>(position);
      return true;
    }
    // They ascend: the lowest of all is that of the lowest slot.
    atomicMin(&item.beyond[rank], static_cast<unsigned long long>(position));
    ReportKind(call, item, slot, kIndex);
    return false;
  });
}

// Reads the value at the position that the record names, if it is in these tensors.
__global__ void ReadBad(REDSYNC_PARAMETER DecodeGroup call) {
  if (threadIdx.x != 0 || IsClear(*call.record)) return;
  const int64_t rank = static_cast<int64_t>(call.record->position) / call.positions;
  for (int i = 0; i < call.count; ++i) {
    const DecodeItem& item = call.items[i];
    const int64_t at = static_cast<int64_t>(call.record->position) % call.positions - item.at;
    if (at < 0 || at >= GolombPlaces(item.slots)) continue;
    const int32_t* part = call.messages + rank * call.stride + item.offset;
    call.record->value = at == 0 ? part[0]
                         : at == 1 || (at - 2) % 3 != kIndex
                             ? part[1]
                             : static_cast<int64_t>(item.beyond[rank]);
  }
}

// Makes the items, in their order; a copy begins anew.
struct Maker {
  const RedsyncGpuGolombDecode& call;
  Divider divider;
  uint32_t* tickets;
  unsigned long long* beyond;
  int64_t at, offset;

  Maker(const RedsyncGpuGolombDecode& call, void* scratch)
      : call(call), divider(scratch), at(0), offset(0) {
    tickets = divider.Take<uint32_t>(call.ranks * call.count);
    beyond = divider.Take<unsigned long long>(call.ranks * call.count);
  }

  DecodeItem operator()(int64_t i) {
    const RedsyncGpuPositions& from = call.tensors[i];
    DecodeItem item = {};
    item.positions = from.out;
    item.counts = call.counts + i;
    item.offset = offset;
    item.at = at;
    item.ticket = tickets + i * call.ranks;
    item.beyond = beyond + i * call.ranks;
    item.size = static_cast<uint32_t>(from.size);
    item.slots = static_cast<uint32_t>(from.slots);
    item.words = static_cast<uint32_t>(GolombWords(from));
    item.rice = static_cast<int>(from.rice);
    const int64_t chunks = call.ranks * item.chunks();
    item.steps = divider.Take<Step>(chunks * (item.rice + 1));
    item.starts = divider.Take<Start>(chunks);
    offset += 2 + item.words;
    at += GolombPlaces(from.slots);
    return item;
  }
};

}  // namespace
}  // namespace gpu
}  // namespace redsync

using namespace redsync::gpu;  // NOLINT: the C interface below is this file's other half.

int64_t redsync_gpu_golomb_decode_scratch_bytes(const RedsyncGpuGolombDecode* call) {
  const int64_t words = redsync_gpu_golomb_words(call->tensors, call->count);
  if (words < 0 || call->words != words || call->ranks < 0 || call->ranks > 65535) return -1;
  Maker make(*call, nullptr);
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
  const Maker make(*call, scratch);
  const int64_t codes = call->ranks * call->count;
  cudaMemsetAsync(make.tickets, 0, codes * sizeof(uint32_t), stream);
  cudaMemsetAsync(make.beyond, 0xff, codes * sizeof(unsigned long long), stream);
  DecodeGroup group = {};
  group.messages = call->messages;
  group.stride = call->stride;
  for (int64_t i = 0; i < call->count; ++i) group.positions += GolombPlaces(call->tensors[i].slots);
  group.tensors = call->count;
  group.record = record;
  const auto ranks = static_cast<uint32_t>(call->ranks);
  auto of_warps = [](const DecodeItem& item) {
    return CeilDiv(item.chunks(), kWarps * ChunksOfWarp(item));
  };
  auto of_threads = [](const DecodeItem& item) { return CeilDiv(item.chunks(), kThreads); };
  ForGroups(group, call->count, make, of_warps, [&](const DecodeGroup& part, uint32_t blocks) {
    REDSYNC_LAUNCH(ReadChunks, dim3(blocks, ranks), kThreads, stream, part);
  });
  ForGroups(group, call->count, make, of_threads, [&](const DecodeGroup& part, uint32_t blocks) {
    REDSYNC_LAUNCH(WritePositions, dim3(blocks, ranks), kThreads, stream, part);
    REDSYNC_LAUNCH(ReadBad, 1, 32, stream, part);
  });
  return LaunchStatus();
}

int redsync_gpu_explain_golomb_decode(const RedsyncGpuGolombDecode* call,
                                      const RedsyncGpuRecord* record, RedsyncGpuCodecError* error) {
  if (IsClear(*record)) return 0;
  int64_t row = 0, tensor = 0;
  for (int64_t i = 0; i < call->count; ++i) row += GolombPlaces(call->tensors[i].slots);
  const auto position = static_cast<int64_t>(record->position);
  int64_t at = position % row;
  for (; at >= GolombPlaces(call->tensors[tensor].slots); ++tensor) {
    at -= GolombPlaces(call->tensors[tensor].slots);
  }
  const RedsyncGpuPositions& p = call->tensors[tensor];
  const double value = static_cast<double>(record->value);
  *error = {"count", position / row, tensor, 0, value, nullptr, p.slots};
  if (at == 0) return 1;
  error->field = "bits";
  error->limit = 32 * GolombWords(p);
  if (at == 1) return 1;
  error->slot = (at - 2) / 3;
  error->rule = (at - 2) % 3 == kTooFew ? "enough for all codes" : "used up by the codes";
  if ((at - 2) % 3 == kIndex) {
    *error = {"index", position / row, tensor, error->slot, value, nullptr, p.size - 1};
  }
  return 1;
}
