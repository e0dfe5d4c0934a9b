// Rice codes: the packed low bits of all numbers, then a bitmap with the high bits of each in
// unary. Encoding writes codes of variable length, and decoding lists set bits.
#include "custom_ops/core/gpu/bitmaps.cuh"
#include "custom_ops/core/gpu/records.cuh"

namespace redsync {
namespace gpu {
namespace {

// Writes a number's zeros and its one, in words that are initially zero.
struct Unary {
  const int32_t* numbers;
  int64_t count;
  int rice;
  Wide bits;  // Bits of the bitmap.
  uint32_t* bitmap;
  RedsyncGpuRecord* record;

  __device__ Wide Length(int64_t i) const {
    return Wide{ZigZag()(static_cast<uint32_t>(numbers[i])) >> rice} + 1;
  }
  __device__ void Put(int64_t i, Wide at) const {
    const Wide end = at + Length(i), one = end - 1;
    if (one < bits) {
      atomicOr(&bitmap[one / 32], 1u << (one % 32));
      return;
    }
    // Ends ascend, so the first one beyond the bitmap is that of the lowest number.
    Report(record, i);
    atomicMin(reinterpret_cast<Wide*>(&record->value), end);
  }
};

bool IsValid(const RedsyncGpuRiceEncode& call) {
  return call.count >= 0 && call.count <= INT32_MAX && call.rice >= 0 && call.rice <= kMaxRice &&
         call.bitmap_words >= 0 && call.bitmap_words <= kMaxBitmapWords;
}

// Parameters of the decoding.
struct Decoding {
  RedsyncGpuRiceDecode call;
  const uint32_t* places;  // [rows, count]: positions of the ones.
  const int32_t* ones;     // [rows]: number of ones.
  RedsyncGpuRecord* record;

  // Number of record positions of a row: one for its ones, and one for every number.
  __host__ __device__ int64_t row() const { return call.count + 1; }
  __device__ Wide Zeros(int64_t row, int64_t i) const {
    const uint32_t* of_row = places + row * call.count;
    return of_row[i] - (i == 0 ? 0 : of_row[i - 1] + 1);
  }
};

// One thread per number, and one for the ones of a row.
__global__ void __launch_bounds__(kThreads) Join(REDSYNC_PARAMETER Decoding d) {
  const int64_t count = d.call.count, places = d.call.rows * d.row();
  const int rice = static_cast<int>(d.call.rice);
  const int64_t words = PackedWords(count, rice) + d.call.bitmap_words;
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t place = int64_t{blockIdx.x} * kThreads + threadIdx.x; place < places;
       place += stride) {
    const int64_t row = place / d.row(), i = place % d.row() - 1;
    const auto ones = static_cast<uint32_t>(d.ones[row]);
    if (i < 0) {
      if (ones != 0 && ones != count) Report(d.record, place);
      continue;
    }
    int32_t* number = d.call.numbers + row * count + i;
    if (ones == 0) *number = 0;
    if (ones != count) continue;
    const Wide low = BitsAt(d.call.codes + row * words, i * rice, rice);
    const Wide z = d.Zeros(row, i) << rice | low;
    if (z > UINT32_MAX) Report(d.record, place);
    *number =
        static_cast<int32_t>(static_cast<uint32_t>(z >> 1) ^ (0 - static_cast<uint32_t>(z & 1)));
  }
}

// Reads the value at the position that the record names.
__global__ void ReadBad(REDSYNC_PARAMETER Decoding d) {
  if (threadIdx.x != 0 || IsClear(*d.record)) return;
  const auto place = static_cast<int64_t>(d.record->position);
  const int64_t row = place / d.row(), i = place % d.row() - 1;
  d.record->value =
      i < 0 ? static_cast<uint32_t>(d.ones[row]) : static_cast<int64_t>(d.Zeros(row, i));
}

// Divides scratch memory. The bitmaps follow the low bits.
struct ItemMaker {
  Divider divider;
  uint32_t* places;
  int32_t* ones;
  Bitmaps bitmaps;

  ItemMaker(const RedsyncGpuRiceDecode& call, void* scratch)
      : divider(scratch),
        places(divider.Take<uint32_t>(call.rows * call.count)),
        ones(divider.Take<int32_t>(call.rows)),
        bitmaps({call.codes + PackedWords(call.count, call.rice), call.rows, call.bitmap_words,
                 call.count, places, ones},
                PackedWords(call.count, call.rice) + call.bitmap_words, &divider) {}
};

}  // namespace
}  // namespace gpu
}  // namespace redsync

using namespace redsync::gpu;  // NOLINT: the C interface below is this file's other half.

int64_t redsync_gpu_rice_encode_scratch_bytes(const RedsyncGpuRiceEncode* call) {
  if (!IsValid(*call)) return -1;
  Divider divider(nullptr);
  const Lengths lengths(call->count, &divider);
  return divider.bytes();
}

int redsync_gpu_rice_encode(const RedsyncGpuRiceEncode* call, RedsyncGpuRecord* record,
                            void* scratch, int64_t scratch_bytes, void* stream_pointer) {
  const int64_t bytes = redsync_gpu_rice_encode_scratch_bytes(call);
  if (bytes < 0) return REDSYNC_GPU_INVALID_ARGUMENT;
  if (scratch_bytes < bytes) return REDSYNC_GPU_SCRATCH_TOO_SMALL;
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  ClearRecord(record, stream);
  const auto* numbers = reinterpret_cast<const uint32_t*>(call->numbers);
  LaunchPack({1, call->count, call->rice, numbers, call->code}, ZigZag(), stream);
  uint32_t* bitmap = call->code + PackedWords(call->count, call->rice);
  cudaMemsetAsync(bitmap, 0, call->bitmap_words * sizeof(uint32_t), stream);
  const auto bits = static_cast<Wide>(32 * call->bitmap_words);
  const int rice = static_cast<int>(call->rice);
  const Unary source = {call->numbers, call->count, rice, bits, bitmap, record};
  Divider divider(scratch);
  LaunchWrite(source, Lengths(call->count, &divider), stream);
  return LaunchStatus();
}

int redsync_gpu_explain_rice_encode(const RedsyncGpuRiceEncode* call,
                                    const RedsyncGpuRecord* record, RedsyncGpuCodecError* error) {
  if (IsClear(*record)) return 0;
  const double length = static_cast<double>(record->value);
  const auto slot = static_cast<int64_t>(record->position);
  *error = {"length", -1, -1, slot, length, nullptr, 32 * call->bitmap_words};
  return 1;
}

int64_t redsync_gpu_rice_decode_scratch_bytes(const RedsyncGpuRiceDecode* call) {
  const RedsyncGpuRiceEncode code = {nullptr, call->count, call->rice, call->bitmap_words, nullptr};
  if (!IsValid(code)) return -1;
  const ItemMaker make(*call, nullptr);
  return IsValid(make.bitmaps.call) ? make.divider.bytes() : -1;
}

int redsync_gpu_rice_decode(const RedsyncGpuRiceDecode* call, RedsyncGpuRecord* record,
                            void* scratch, int64_t scratch_bytes, void* stream_pointer) {
  const int64_t bytes = redsync_gpu_rice_decode_scratch_bytes(call);
  if (bytes < 0) return REDSYNC_GPU_INVALID_ARGUMENT;
  if (scratch_bytes < bytes) return REDSYNC_GPU_SCRATCH_TOO_SMALL;
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  ClearRecord(record, stream);
  if (call->rows == 0) return LaunchStatus();
  const ItemMaker make(*call, scratch);
  List(make.bitmaps, stream);
  const Decoding decoding = {*call, make.places, make.ones, record};
  const int64_t places = call->rows * decoding.row();
  REDSYNC_LAUNCH(Join, GridFor(places), kThreads, stream, decoding);
  REDSYNC_LAUNCH(ReadBad, 1, 32, stream, decoding);
  return LaunchStatus();
}

int redsync_gpu_explain_rice_decode(const RedsyncGpuRiceDecode* call,
                                    const RedsyncGpuRecord* record, RedsyncGpuCodecError* error) {
  if (IsClear(*record)) return 0;
  const auto place = static_cast<int64_t>(record->position);
  const int64_t row = place / (call->count + 1), i = place % (call->count + 1) - 1;
  const double value = static_cast<double>(record->value);
  if (i < 0) {
    *error = {"number of ones", row, -1, 0, value, "0, or one for each number", 0};
  } else {
    *error = {"number of zeros", row, -1, i, value, nullptr, int64_t{UINT32_MAX} >> call->rice};
  }
  return 1;
}
