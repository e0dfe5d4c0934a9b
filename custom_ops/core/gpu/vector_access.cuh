// Four neighbours of a tensor that a thread loads and stores together.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_GPU_VECTOR_ACCESS_CUH_
#define TF_REDSYNC_CUSTOM_OPS_CORE_GPU_VECTOR_ACCESS_CUH_

#include "custom_ops/core/gpu/platform.cuh"

namespace redsync {
namespace gpu {

struct Vec4 {
  float at[4];
};

// Returns whether vectors of four can be loaded at multiples of four elements from an address.
inline bool IsAligned(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % sizeof(float4) == 0;
}

// Loads four elements, zeros beyond the end. `at` is a multiple of four, so at + 3 fits a uint32_t,
// but at + 4 may overflow.
__device__ inline Vec4 Load(const float* data, uint32_t at, uint32_t size, bool aligned) {
  Vec4 vec;
  if (aligned && at < size && size - at >= 4) {
    const float4 x = *reinterpret_cast<const float4*>(data + at);
    return {{x.x, x.y, x.z, x.w}};
  }
  for (int c = 0; c < 4; ++c) vec.at[c] = at + c < size ? data[at + c] : 0.0f;
  return vec;
}

// Returns the float whose upper half are the bfloat16 bits.
__device__ inline float Widened(uint32_t bits) { return __int_as_float(bits << 16); }

// The same for bfloat16.
__device__ inline Vec4 Load(const uint16_t* data, uint32_t at, uint32_t size, bool aligned) {
  Vec4 vec;
  if (aligned && at < size && size - at >= 4) {
    const uint2 x = *reinterpret_cast<const uint2*>(data + at);
    return {{Widened(x.x), Widened(x.x >> 16), Widened(x.y), Widened(x.y >> 16)}};
  }
  for (int c = 0; c < 4; ++c) vec.at[c] = at + c < size ? Widened(data[at + c]) : 0.0f;
  return vec;
}

__device__ inline void Store(float* data, uint32_t at, uint32_t size, bool aligned,
                             const Vec4& vec) {
  if (aligned && at < size && size - at >= 4) {
    *reinterpret_cast<float4*>(data + at) = make_float4(vec.at[0], vec.at[1], vec.at[2], vec.at[3]);
    return;
  }
  for (int c = 0; c < 4; ++c) {
    if (at + c < size) data[at + c] = vec.at[c];
  }
}

}  // namespace gpu
}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_GPU_VECTOR_ACCESS_CUH_
