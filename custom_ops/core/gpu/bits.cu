// Concatenated codes of fixed and of variable length.
#include "custom_ops/core/gpu/bits.cuh"
#include "custom_ops/core/gpu/records.cuh"

namespace redsync {
namespace gpu {
namespace {

// One thread per code.
__global__ void __launch_bounds__(kThreads) Unpack(REDSYNC_PARAMETER RedsyncGpuPackedCodes call) {
  const int64_t words = PackedWords(call.count, call.bits);
  const int bits = static_cast<int>(call.bits);
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < call.rows * call.count;
       i += stride) {
    call.out[i] = BitsAt(call.in + i / call.count * words, i % call.count * bits, bits);
  }
}

bool IsValid(const RedsyncGpuPackedCodes& call) {
  return call.rows >= 0 && call.count >= 0 && call.bits >= 0 && call.bits <= kMaxCodeBits;
}

// Codes with given lengths. Words are initially zero, and several threads set bits of a word.
struct VariableCodes {
  RedsyncGpuWriteBits call;
  int64_t count;
  RedsyncGpuRecord* record;

  __device__ bool IsValidLength(int64_t i) const {
    return static_cast<uint32_t>(call.lengths[i]) <= kMaxCodeBits;
  }
  __device__ Wide Length(int64_t i) const {
    if (!IsValidLength(i)) Report(record, i);
    return IsValidLength(i) ? call.lengths[i] : 0;
  }
  __device__ void Put(int64_t i, Wide at) const {
    if (!IsValidLength(i)) return;
    const uint64_t code = call.codes[i] & ((uint64_t{1} << call.lengths[i]) - 1);
    const auto size = static_cast<Wide>(call.size);
    const auto low = static_cast<uint32_t>(code << (at % 32));
    const auto high = static_cast<uint32_t>(code >> (32 - at % 32));
    if (low != 0 && at / 32 < size) atomicOr(&call.words[at / 32], low);
    if (high != 0 && at / 32 + 1 < size) atomicOr(&call.words[at / 32 + 1], high);
  }
};

// Reads the length at the position in the record.
__global__ void ReadBad(REDSYNC_PARAMETER VariableCodes source) {
  RedsyncGpuRecord* record = source.record;
  if (threadIdx.x == 0 && !IsClear(*record)) record->value = source.call.lengths[record->position];
}

}  // namespace
}  // namespace gpu
}  // namespace redsync

using namespace redsync::gpu;  // NOLINT: the C interface below is this file's other half.

int redsync_gpu_pack_bits(const RedsyncGpuPackedCodes* call, void* stream_pointer) {
  if (!IsValid(*call)) return REDSYNC_GPU_INVALID_ARGUMENT;
  LaunchPack(*call, Plain(), static_cast<cudaStream_t>(stream_pointer));
  return LaunchStatus();
}

int redsync_gpu_unpack_bits(const RedsyncGpuPackedCodes* call, void* stream_pointer) {
  if (!IsValid(*call)) return REDSYNC_GPU_INVALID_ARGUMENT;
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  const int64_t codes = call->rows * call->count;
  if (codes > 0) REDSYNC_LAUNCH(Unpack, GridFor(codes), kThreads, stream, *call);
  return LaunchStatus();
}

int64_t redsync_gpu_write_bits_scratch_bytes(const RedsyncGpuWriteBits* call) {
  if (call->count < 0 || call->count > INT32_MAX || call->size < 0) return -1;
  Divider divider(nullptr);
  const Lengths lengths(call->count, &divider);
  return divider.bytes();
}

int redsync_gpu_write_bits(const RedsyncGpuWriteBits* call, RedsyncGpuRecord* record, void* scratch,
                           int64_t scratch_bytes, void* stream_pointer) {
  const int64_t bytes = redsync_gpu_write_bits_scratch_bytes(call);
  if (bytes < 0) return REDSYNC_GPU_INVALID_ARGUMENT;
  if (scratch_bytes < bytes) return REDSYNC_GPU_SCRATCH_TOO_SMALL;
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  ClearRecord(record, stream);
  cudaMemsetAsync(call->words, 0, call->size * sizeof(uint32_t), stream);
  Divider divider(scratch);
  const VariableCodes source = {*call, call->count, record};
  LaunchWrite(source, Lengths(call->count, &divider), stream);
  REDSYNC_LAUNCH(ReadBad, 1, 32, stream, source);
  return LaunchStatus();
}

int redsync_gpu_explain_write_bits(const RedsyncGpuWriteBits*, const RedsyncGpuRecord* record,
                                   RedsyncGpuCodecError* error) {
  if (IsClear(*record)) return 0;
  const double length = static_cast<double>(record->value);
  *error = {"length", -1,      -1,          static_cast<int64_t>(record->position),
            length,   nullptr, kMaxCodeBits};
  return 1;
}
