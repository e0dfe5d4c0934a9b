// The threads of a block as fibers: the lower layer of emulator.h.
#ifndef TF_REDSYNC_TESTS_GPU_FIBERS_H_
#define TF_REDSYNC_TESTS_GPU_FIBERS_H_

#include <cstdint>
#include <cstring>
#include <functional>

struct dim3 {
  unsigned x, y;
  dim3(unsigned x = 1, unsigned y = 1) : x(x), y(y) {}  // NOLINT: as in CUDA.
};
extern dim3 threadIdx, blockIdx, blockDim, gridDim;  // Of the running fiber.

// Variables of the emulator and the race detector, apart from the shared ones of kernels.
#define EMULATOR_STATE __attribute__((section("emulator_state")))

namespace emulator {

// Number of blocks that fit on the device at once.
constexpr unsigned kMultiprocessors = 3, kBlocksAtOnce = 2;

// Runs a kernel on all blocks, one after the other or, in a cooperative launch, together.
void Launch(dim3 grid, unsigned threads, void* stream, std::function<void()> body,
            bool together = false);

// A barrier of the block, and one of the warp; lets other blocks continue.
void WaitForBlock();
void SyncWarp();
void WaitForOthers();

// The values that all lanes pass to an instruction of their warp.
const uint64_t* Exchange(uint64_t value);

template <class T>
__attribute__((no_sanitize_thread)) T Shuffle(T value, unsigned lane) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(value));
  const uint64_t* all = Exchange(bits);
  std::memcpy(&value, &all[lane], sizeof(value));
  return value;
}

}  // namespace emulator

#endif  // TF_REDSYNC_TESTS_GPU_FIBERS_H_
