// Records of the first invalid word that a kernel reads, see RedsyncGpuRecord.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_GPU_RECORDS_CUH_
#define TF_REDSYNC_CUSTOM_OPS_CORE_GPU_RECORDS_CUH_

#include <cstring>

#include "custom_ops/core/gpu/c_api.h"
#include "custom_ops/core/gpu/platform.cuh"

namespace redsync {
namespace gpu {

inline void ClearRecord(RedsyncGpuRecord* record, cudaStream_t stream) {
  cudaMemsetAsync(record, 0xff, sizeof(*record), stream);
}

// Records an invalid word; the lowest position wins.
__device__ inline void Report(RedsyncGpuRecord* record, int64_t position) {
  atomicMin(reinterpret_cast<unsigned long long*>(&record->position),
            static_cast<unsigned long long>(position));
}

// Returns whether no error is recorded.
__host__ __device__ inline bool IsClear(const RedsyncGpuRecord& record) {
  return record.position == UINT64_MAX;
}

// Returns the number that an error shows for an invalid position, `word` in the record: signed for
// tensors below 2^31 elements, where a negative index is the likely mistake.
__host__ __device__ inline int64_t ReportedIndex(int64_t word, int64_t size) {
  const auto bits = static_cast<uint32_t>(word);
  return size > INT32_MAX ? int64_t{bits} : int64_t{static_cast<int32_t>(bits)};
}

__device__ inline bool IsFinite(int32_t bits) { return (bits & 0x7f800000) != 0x7f800000; }

// Returns the float with the bits of a word; on the host.
inline float FloatOf(int64_t word) {
  const auto bits = static_cast<int32_t>(word);
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// Returns the code of a status; redsync_gpu_last_error() returns the process's last failure.
int Result(cudaError_t status);

// Returns the code of the last launch, and clears the error, so that the next call does not report
// it.
inline int LaunchStatus() { return Result(cudaGetLastError()); }

}  // namespace gpu
}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_GPU_RECORDS_CUH_
