// What the GPU part of the selection benchmark compares with: the plain accumulate pass, and a
// radix sort of keys and positions from the toolkit's CUB. Built when it is needed, nowhere else.
#include <cuda_runtime.h>

#include <cstdint>
#include <cub/device/device_radix_sort.cuh>

namespace {

// u = m u + g; v = v + u, four elements a thread; without momentum v = v + g.
__global__ void Accumulate(const float4* g, const float4* v, const float4* u, float4* new_v,
                           float4* new_u, float m, int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float4 a = g[i], b = v[i];
  if (u != nullptr) {
    const float4 c = u[i];
    a = {m * c.x + a.x, m * c.y + a.y, m * c.z + a.z, m * c.w + a.w};
    new_u[i] = a;
  }
  new_v[i] = {b.x + a.x, b.y + a.y, b.z + a.z, b.w + a.w};
}

__global__ void Magnitudes(const uint32_t* v, uint32_t* magnitudes, uint32_t* positions,
                           int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  magnitudes[i] = v[i] & 0x7fffffffu;
  positions[i] = static_cast<uint32_t>(i);
}

unsigned Blocks(int64_t items) { return static_cast<unsigned>((items + 255) / 256); }

}  // namespace

// `n` is a multiple of 4; `u` may be null.
extern "C" int benchmark_accumulate(const float* g, const float* v, const float* u, float* new_v,
                                    float* new_u, float m, int64_t n) {
  auto four = [](const float* p) { return reinterpret_cast<const float4*>(p); };
  Accumulate<<<Blocks(n / 4), 256>>>(four(g), four(v), four(u), reinterpret_cast<float4*>(new_v),
                                     reinterpret_cast<float4*>(new_u), m, n / 4);
  return cudaGetLastError();
}

extern "C" int64_t benchmark_sort_bytes(int64_t n) {
  size_t bytes = 0;
  uint32_t* none = nullptr;
  cub::DeviceRadixSort::SortPairsDescending(nullptr, bytes, none, none, none, none, n, 0, 31);
  return static_cast<int64_t>(bytes);
}

// Sorts the magnitudes of `v` with their positions; `work` holds 4 n words.
extern "C" int benchmark_sort(const uint32_t* v, uint32_t* work, void* scratch,
                              int64_t scratch_bytes, int64_t n) {
  size_t bytes = static_cast<size_t>(scratch_bytes);
  Magnitudes<<<Blocks(n), 256>>>(v, work, work + n, n);
  return cub::DeviceRadixSort::SortPairsDescending(scratch, bytes, work, work + 2 * n, work + n,
                                                   work + 3 * n, n, 0, 31);
}
