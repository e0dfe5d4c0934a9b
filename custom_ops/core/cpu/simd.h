// Choice among the compiled versions of a vector loop.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_CPU_SIMD_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_CPU_SIMD_H_

// Sources that are compiled for several instruction sets test this.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define REDSYNC_X86_VERSIONS 1
#endif

namespace redsync {

enum class Simd { kPlain, kAvx2, kAvx512 };

// Returns the widest instruction set that both the CPU and the compiler support. The environment
// variable TF_REDSYNC_SIMD (plain, avx2, avx512) sets an upper limit, for tests; it is read once.
Simd WidestSimd();

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_CPU_SIMD_H_
