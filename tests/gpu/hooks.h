// The functions that g++ -fsanitize=thread calls before every memory access, instead of the
// sanitizer's runtime library. One source of a program includes this file and defines Touch().
#ifndef TF_REDSYNC_TESTS_GPU_HOOKS_H_
#define TF_REDSYNC_TESTS_GPU_HOOKS_H_

#include <cstddef>
#include <cstring>

namespace emulator {

void Touch(const void* memory, size_t bytes, bool writes, const void* place);  // Program counter.

}  // namespace emulator

#define REDSYNC_HOOKS(bytes)                                        \
  void __tsan_read##bytes(void* at) {                               \
    emulator::Touch(at, bytes, false, __builtin_return_address(0)); \
  }                                                                 \
  void __tsan_write##bytes(void* at) {                              \
    emulator::Touch(at, bytes, true, __builtin_return_address(0));  \
  }                                                                 \
  void __tsan_unaligned_read##bytes(void* at) {                     \
    emulator::Touch(at, bytes, false, __builtin_return_address(0)); \
  }                                                                 \
  void __tsan_unaligned_write##bytes(void* at) {                    \
    emulator::Touch(at, bytes, true, __builtin_return_address(0));  \
  }

extern "C" {
REDSYNC_HOOKS(1)
REDSYNC_HOOKS(2)
REDSYNC_HOOKS(4)
REDSYNC_HOOKS(8)
REDSYNC_HOOKS(16)
void __tsan_read_range(void* at, size_t bytes) {
  emulator::Touch(at, bytes, false, __builtin_return_address(0));
}
void __tsan_write_range(void* at, size_t bytes) {
  emulator::Touch(at, bytes, true, __builtin_return_address(0));
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_read(void*) {}
void __tsan_vptr_update(void*, void*) {}
// For the host's std::atomic, and the locks of its local statics.
int __tsan_atomic32_load(const volatile int* at, int) { return *at; }
void __tsan_atomic32_store(volatile int* at, int value, int) { *at = value; }
char __tsan_atomic8_load(const volatile char* at, int) { return *at; }
void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  return std::memcpy(to, from, bytes);
}
void* __tsan_memset(void* to, int value, size_t bytes) { return std::memset(to, value, bytes); }
}

#endif  // TF_REDSYNC_TESTS_GPU_HOOKS_H_
