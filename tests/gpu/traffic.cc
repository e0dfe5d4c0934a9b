// Counts the bytes of device memory that threads of emulated kernels read and write, without shared
// memory and parameters. Caches are not modeled.
#include <cstdint>

#include "fibers.h"
#include "hooks.h"
#include "races.h"

namespace emulator {
namespace {

constexpr uintptr_t kStack = 1 << 20;  // Bytes of the host's stack that hold a launch's parameters.

EMULATOR_STATE bool running = false;
EMULATOR_STATE uintptr_t frame = 0;           // Frame of the launch.
EMULATOR_STATE int64_t bytes_of[2] = {0, 0};  // Read, written.

}  // namespace

void Touch(const void* memory, size_t bytes, bool writes, const void*) {
  if (!running || IsPrivate(memory) || IsShared(memory)) return;
  if (reinterpret_cast<uintptr_t>(memory) - frame < kStack) return;
  bytes_of[writes] += static_cast<int64_t>(bytes);
}
void TouchAtomically(const void* memory, size_t bytes, const void* place) {
  Touch(memory, bytes, false, place);
  Touch(memory, bytes, true, place);
}
void StartLaunch(unsigned) { frame = reinterpret_cast<uintptr_t>(__builtin_frame_address(0)); }
void StartBlock(unsigned, unsigned) { running = true; }
void EnterBlock(unsigned) { running = true; }
void LeaveBlock() { running = false; }
void PassBarrier() {}
void PassWarp(unsigned) {}
void Fence() {}

}  // namespace emulator

extern "C" int64_t emulator_bytes(int written) {
  return emulator::bytes_of[written];
}  // Total so far.
