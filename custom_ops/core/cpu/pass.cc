#include "custom_ops/core/cpu/pass.h"

#include <cmath>
#include <cstring>

#include "custom_ops/core/cpu/common.h"
#include "custom_ops/core/cpu/simd.h"

// One source, compiled for several instruction sets and chosen at run time.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Vectors wider than the base instruction set are only passed between inlined functions.
#pragma GCC diagnostic ignored "-Wpsabi"
#pragma GCC diagnostic ignored "-Wignored-attributes"

namespace redsync {
namespace {

// Makes what Stream() stored visible to other threads.
inline void FenceStreams() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

namespace plain {
#define REDSYNC_LANES 4
template <class Vector>
inline uint32_t MaskAbove(const Vector& v, int32_t threshold) {
#if defined(__SSE2__)
  const __m128i above = _mm_cmpgt_epi32((__m128i)v, _mm_set1_epi32(threshold));
  return _mm_movemask_ps(_mm_castsi128_ps(above));
#else
  uint32_t mask = 0;
  for (int i = 0; i < 4; ++i) mask |= static_cast<uint32_t>(v[i] > threshold) << i;
  return mask;
#endif
}
template <class Vector>
inline bool AnyAbove(const Vector& v, int32_t threshold) {
  return MaskAbove(v, threshold) != 0;
}
template <class Vector>
inline void Stream(float* memory, const Vector& v) {
#if defined(__SSE2__)
  _mm_stream_ps(memory, (__m128)v);
#else
  std::memcpy(memory, &v, sizeof(v));
#endif
}
template <class Vector>
inline Vector Sqrt(const Vector& v) {
#if defined(__SSE2__)
  return (Vector)_mm_sqrt_ps((__m128)v);
#else
  return Vector{std::sqrt(v[0]), std::sqrt(v[1]), std::sqrt(v[2]), std::sqrt(v[3])};
#endif
}
#include "custom_ops/core/cpu/pass_inl.h"
#undef REDSYNC_LANES
}  // namespace plain

#ifdef REDSYNC_X86_VERSIONS

#pragma GCC push_options
#pragma GCC target("avx2")
namespace avx2 {
#define REDSYNC_LANES 8
template <class Vector>
inline uint32_t MaskAbove(const Vector& v, int32_t threshold) {
  const __m256i above = _mm256_cmpgt_epi32((__m256i)v, _mm256_set1_epi32(threshold));
  return _mm256_movemask_ps(_mm256_castsi256_ps(above));
}
template <class Vector>
inline bool AnyAbove(const Vector& v, int32_t threshold) {
  return MaskAbove(v, threshold) != 0;
}
template <class Vector>
inline void Stream(float* memory, const Vector& v) {
  _mm256_stream_ps(memory, (__m256)v);
}
template <class Vector>
inline Vector Sqrt(const Vector& v) {
  return (Vector)_mm256_sqrt_ps((__m256)v);
}
#include "custom_ops/core/cpu/pass_inl.h"
#undef REDSYNC_LANES
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512dq,avx512bw,prefer-vector-width=512")
namespace avx512 {
#define REDSYNC_LANES 16
template <class Vector>
inline bool AnyAbove(const Vector& v, int32_t threshold) {
  return _mm512_cmpgt_epi32_mask((__m512i)v, _mm512_set1_epi32(threshold)) != 0;
}
// Uses two halves and no mask registers. Under register pressure, GCC 12 widens a 16-bit mask by
// storing 16 bits to the stack and loading 32, whose upper half is garbage.
template <class Vector>
inline uint32_t MaskAbove(const Vector& v, int32_t threshold) {
  const __m256i limit = _mm256_set1_epi32(threshold);
  __m256i half[2];
  std::memcpy(half, &v, sizeof(half));
  const uint32_t low = _mm256_movemask_ps((__m256)_mm256_cmpgt_epi32(half[0], limit));
  const uint32_t high = _mm256_movemask_ps((__m256)_mm256_cmpgt_epi32(half[1], limit));
  return low | high << 8;
}
template <class Vector>
inline void Stream(float* memory, const Vector& v) {
  _mm512_stream_ps(memory, (__m512)v);
}
// Not _mm512_sqrt_ps(): GCC 12 warns that its undefined operand is not initialized.
template <class Vector>
inline Vector Sqrt(const Vector& v) {
  return (Vector)_mm512_maskz_sqrt_ps(0xffff, (__m512)v);
}
#include "custom_ops/core/cpu/pass_inl.h"
#undef REDSYNC_LANES
}  // namespace avx512
#pragma GCC pop_options

#endif  // REDSYNC_X86_VERSIONS

const PassFunctions kPlain = {"plain", plain::Accumulate, plain::Scan};
#ifdef REDSYNC_X86_VERSIONS
const PassFunctions kAvx2 = {"avx2", avx2::Accumulate, avx2::Scan};
const PassFunctions kAvx512 = {"avx512", avx512::Accumulate, avx512::Scan};
#endif

}  // namespace

const PassFunctions& Passes() {
#ifdef REDSYNC_X86_VERSIONS
  if (WidestSimd() == Simd::kAvx512) return kAvx512;
  if (WidestSimd() == Simd::kAvx2) return kAvx2;
#endif
  return kPlain;
}

}  // namespace redsync
