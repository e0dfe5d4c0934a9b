// Shared code of the tests of core/cpu: checks, a digest of results, threads.
#ifndef TF_REDSYNC_TESTS_KERNELS_CORE_TESTING_H_
#define TF_REDSYNC_TESTS_KERNELS_CORE_TESTING_H_

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "custom_ops/core/cpu/common.h"

namespace redsync {
namespace testing {

inline int failures = 0;
inline uint64_t digest = 1469598103934665603u;

inline void Mix(const void* data, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) {
    digest = (digest ^ static_cast<const unsigned char*>(data)[i]) * 1099511628211u;
  }
}

inline void Check(bool ok, const std::string& what) {
  if (ok) return;
  if (++failures <= 20) std::printf("FAILED: %s\n", what.c_str());
}

inline ParallelFor Threads(int threads) {
  return [threads](int64_t count, int64_t, const RangeBody& body) {
    if (count <= 1 || threads == 1) return body(0, count);
    std::vector<std::thread> pool;
    for (int t = 0; t < threads; ++t) {
      const int64_t first = count * t / threads, last = count * (t + 1) / threads;
      if (first < last) pool.emplace_back([=, &body] { body(first, last); });
    }
    for (std::thread& thread : pool) thread.join();
  };
}

// Zeros that take memory only where they are written.
template <class T>
T* Map(int64_t size) {
  void* memory = mmap(nullptr, size * sizeof(T), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) std::exit(2);
  madvise(memory, size * sizeof(T), MADV_HUGEPAGE);  // Fewer page faults, if the system will.
  return static_cast<T*>(memory);
}

// Prints the instruction set and the digest; returns the exit status.
inline int Report(const char* simd) {
  std::printf("%s %016llx\n", simd, static_cast<unsigned long long>(digest));
  return failures == 0 ? 0 : 1;
}

}  // namespace testing
}  // namespace redsync

#endif  // TF_REDSYNC_TESTS_KERNELS_CORE_TESTING_H_
