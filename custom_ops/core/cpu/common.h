// Status, parallel loops and the treatment of denormals, for all CPU algorithms.
//
// Code in core/ does not include TensorFlow, allocate large memory, throw or abort. Callers pass
// raw pointers, 64-bit sizes, scratch memory and a parallel loop, and receive a status.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_CPU_COMMON_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_CPU_COMMON_H_

#include <cstdint>
#include <cstring>
#include <functional>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace redsync {

enum class Status {
  kOk,
  kInvalidArgument,  // An argument is out of its documented range.
  kScratchTooSmall,  // Less scratch memory than the size query returned.
  kInvalidMessage,   // A received message is malformed; see DecodeError.
};

// Calls body(first, last) on disjoint ranges that cover [0, count), possibly from several threads,
// and returns when all are done. `cost` is the approximate cost of one item in CPU cycles.
using RangeBody = std::function<void(int64_t first, int64_t last)>;
using ParallelFor = std::function<void(int64_t count, int64_t cost, const RangeBody& body)>;

// Positions in a tensor are unsigned 32-bit integers in messages.
constexpr int64_t kMaxElements = UINT32_MAX;

// Returns the number that an error shows for an invalid position: signed for tensors below 2^31
// elements, where a negative index is the likely mistake.
inline int64_t ReportedIndex(uint32_t position, int64_t size) {
  return size > INT32_MAX ? int64_t{position} : int64_t{static_cast<int32_t>(position)};
}

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int32_t BitsOf(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline float FloatOf(int32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// Treats denormal inputs as zero and flushes denormal results to zero while in scope, like all of
// TensorFlow's threads. Without it a result could depend on the thread of its block.
class ScopedFlushDenormals {
 public:
#if defined(__SSE2__)
  ScopedFlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~ScopedFlushDenormals() { _mm_setcsr(saved_); }

 private:
  unsigned int saved_;
#elif defined(__aarch64__)
  ScopedFlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(saved_ | (uint64_t{1} << 24)));
  }
  ~ScopedFlushDenormals() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#else
  ScopedFlushDenormals() {}
  ~ScopedFlushDenormals() {}

 private:
#endif
  ScopedFlushDenormals(const ScopedFlushDenormals&) = delete;
  void operator=(const ScopedFlushDenormals&) = delete;
};

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_CPU_COMMON_H_
