// Bitmaps: bits are set atomically, and prefix sums over their words give the slots of positions.
#include "custom_ops/core/gpu/bitmaps.cuh"
#include "custom_ops/core/gpu/records.cuh"

namespace redsync {
namespace gpu {
namespace {

// One thread per position. In the record, position 0 is the count; the positions follow.
__global__ void __launch_bounds__(kThreads)
    Mark(REDSYNC_PARAMETER RedsyncGpuBitmap call, RedsyncGpuRecord* record) {
  const int64_t count = *call.count, first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (count < 0 || count > call.slots) {
    if (first == 0) Report(record, 0);
    return;
  }
  for (int64_t i = first; i < count; i += int64_t{gridDim.x} * kThreads) {
    const uint32_t position = call.positions[i];
    if (position >= 32 * call.size || (i > 0 && position <= call.positions[i - 1])) {
      Report(record, 1 + i);
    } else {
      atomicOr(&call.words[position / 32], 1u << (position % 32));
    }
  }
}

// Reads the value at the position that the record names.
__global__ void ReadBad(REDSYNC_PARAMETER RedsyncGpuBitmap call, RedsyncGpuRecord* record) {
  if (threadIdx.x != 0 || IsClear(*record)) return;
  const uint64_t at = record->position;
  record->value = at == 0 ? *call.count : int64_t{call.positions[at - 1]};
}

__device__ inline uint32_t WordOf(const Bitmaps& maps) {
  const int64_t word = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  return word < maps.call.size ? maps.call.words[blockIdx.y * maps.stride + word] : 0;
}

__global__ void __launch_bounds__(kThreads) CountSet(REDSYNC_PARAMETER Bitmaps maps) {
  const int64_t row = blockIdx.y;
  Tally<1>* before = maps.before + row * maps.tiles();
  const auto set = BlockReduce(static_cast<uint32_t>(__popc(WordOf(maps))), Add());
  if (threadIdx.x == 0) before[blockIdx.x] = {{set}};
  if (!IsLastBlock(maps.ticket + row, maps.tiles())) return;
  const Tally<1> total = ScanTallies(before, maps.tiles());
  if (threadIdx.x == 0) maps.call.counts[row] = static_cast<int32_t>(total.at[0]);
}

__global__ void __launch_bounds__(kThreads) ListSet(REDSYNC_PARAMETER Bitmaps maps) {
  const int64_t row = blockIdx.y;
  const auto slots = static_cast<uint32_t>(maps.call.slots);
  uint32_t* positions = maps.call.positions + row * maps.call.slots;
  const uint32_t first = blockIdx.x * kThreads + threadIdx.x, word = WordOf(maps);
  uint32_t all;
  const uint32_t before = BlockScan(static_cast<uint32_t>(__popc(word)), &all);
  ListBits(word, first, maps.before[row * maps.tiles() + blockIdx.x].at[0] + before, slots,
           positions);
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  const int64_t listed = static_cast<uint32_t>(maps.call.counts[row]);
  for (int64_t i = listed + first; i < slots; i += stride) positions[i] = 0;
}

}  // namespace

bool IsValid(const RedsyncGpuSetBits& call) {
  return call.rows >= 0 && call.rows <= 65535 && call.size >= 0 && call.size <= kMaxBitmapWords &&
         call.slots >= 0 && call.slots <= INT32_MAX;
}

void List(const Bitmaps& bitmaps, cudaStream_t stream) {
  const RedsyncGpuSetBits& call = bitmaps.call;
  const dim3 grid(bitmaps.tiles(), static_cast<uint32_t>(call.rows));
  if (call.rows == 0) return;
  if (call.size == 0) {
    cudaMemsetAsync(call.counts, 0, call.rows * sizeof(int32_t), stream);
    cudaMemsetAsync(call.positions, 0, call.rows * call.slots * sizeof(uint32_t), stream);
    return;
  }
  cudaMemsetAsync(bitmaps.ticket, 0, call.rows * sizeof(uint32_t), stream);
  REDSYNC_LAUNCH(CountSet, grid, kThreads, stream, bitmaps);
  REDSYNC_LAUNCH(ListSet, grid, kThreads, stream, bitmaps);
}

}  // namespace gpu
}  // namespace redsync

using namespace redsync::gpu;  // NOLINT: the C interface below is this file's other half.

int redsync_gpu_bitmap(const RedsyncGpuBitmap* call, RedsyncGpuRecord* record,
                       void* stream_pointer) {
  if (call->slots < 0 || call->slots > INT32_MAX || call->size < 0 ||
      call->size > kMaxBitmapWords) {
    return REDSYNC_GPU_INVALID_ARGUMENT;
  }
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  ClearRecord(record, stream);
  cudaMemsetAsync(call->words, 0, call->size * sizeof(uint32_t), stream);
  REDSYNC_LAUNCH(Mark, GridFor(call->slots), kThreads, stream, *call, record);
  REDSYNC_LAUNCH(ReadBad, 1, 32, stream, *call, record);
  return LaunchStatus();
}

int redsync_gpu_explain_bitmap(const RedsyncGpuBitmap* call, const RedsyncGpuRecord* record,
                               RedsyncGpuCodecError* error) {
  if (IsClear(*record)) return 0;
  const auto slot = static_cast<int64_t>(record->position) - 1;
  if (slot < 0) {
    *error = {"count", -1, -1, 0, static_cast<double>(record->value), nullptr, call->slots};
    return 1;
  }
  const int64_t size = 32 * call->size, index = ReportedIndex(record->value, size);
  const bool in_range = index >= 0 && index < size;
  *error = {"index", -1, -1, slot, static_cast<double>(index), in_range ? "ascending" : nullptr,
            size - 1};
  return 1;
}

int64_t redsync_gpu_set_bits_scratch_bytes(const RedsyncGpuSetBits* call) {
  if (!IsValid(*call) || call->size > kMaxListedWords) return -1;
  Divider divider(nullptr);
  const Bitmaps bitmaps(*call, call->size, &divider);
  return divider.bytes();
}

int redsync_gpu_set_bits(const RedsyncGpuSetBits* call, void* scratch, int64_t scratch_bytes,
                         void* stream_pointer) {
  const int64_t bytes = redsync_gpu_set_bits_scratch_bytes(call);
  if (bytes < 0) return REDSYNC_GPU_INVALID_ARGUMENT;
  if (scratch_bytes < bytes) return REDSYNC_GPU_SCRATCH_TOO_SMALL;
  Divider divider(scratch);
  List(Bitmaps(*call, call->size, &divider), static_cast<cudaStream_t>(stream_pointer));
  return LaunchStatus();
}
