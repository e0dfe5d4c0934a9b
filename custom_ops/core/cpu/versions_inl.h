// Compiles the file REDSYNC_SOURCE for several instruction sets, into the namespaces plain, avx2
// and avx512. WidestSimd() returns the widest one that may run.
namespace plain {
#include REDSYNC_SOURCE
}  // namespace plain

#ifdef REDSYNC_X86_VERSIONS
#pragma GCC push_options
#pragma GCC target("avx2")
namespace avx2 {
#include REDSYNC_SOURCE
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512dq,avx512bw,prefer-vector-width=512")
namespace avx512 {
#include REDSYNC_SOURCE
}  // namespace avx512
#pragma GCC pop_options
#endif

#undef REDSYNC_SOURCE
