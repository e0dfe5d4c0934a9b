#include "custom_ops/core/cpu/simd.h"

#include <cstdlib>
#include <cstring>

namespace redsync {
namespace {

Simd Choose() {
#ifdef REDSYNC_X86_VERSIONS
  const char* limit = std::getenv("TF_REDSYNC_SIMD");
  auto at_most = [limit](const char* name) { return limit && std::strcmp(limit, name) == 0; };
  __builtin_cpu_init();
  if (at_most("plain") || !__builtin_cpu_supports("avx2")) return Simd::kPlain;
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
  return at_most("avx2") || !has_avx512 ? Simd::kAvx2 : Simd::kAvx512;
#else
  return Simd::kPlain;
#endif
}

}  // namespace

Simd WidestSimd() {
  static const Simd simd = Choose();
  return simd;
}

}  // namespace redsync
