// Runs CUDA kernels on the CPU: enough of the language for custom_ops/core/gpu, and no more.
//
//   g++ -x c++ -std=c++17 -DREDSYNC_GPU_EMULATOR -include tests/gpu/emulator.h -I. file.cu ...
//
// Blocks run one after the other, in an order that is shuffled anew for every launch. The threads
// of a block are fibers: each runs until it needs the others (a barrier of the block, an
// instruction of the warp), and in which order is shuffled as well. Code that waits where not all
// threads come, or that relies on an order without a barrier, aborts or computes something else.
// What is not emulated: the memory model between blocks, and time. Denormals are zero, as with nvcc
// -ftz=true.
#ifndef TF_REDSYNC_TESTS_GPU_EMULATOR_H_
#define TF_REDSYNC_TESTS_GPU_EMULATOR_H_

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#define __global__ static
#define __device__
#define __host__
#define __shared__ static  // One block at a time. Full of what the last one left, as on a GPU.
#define __launch_bounds__(threads)
#define REDSYNC_PARAMETER const
#define REDSYNC_LAUNCH(kernel, grid, threads, stream, ...) \
  emulator::Launch(grid, threads, stream, [&] { kernel(__VA_ARGS__); })

struct dim3 {
  unsigned x, y;
  dim3(unsigned x = 1, unsigned y = 1) : x(x), y(y) {}  // NOLINT: as in CUDA.
};
struct float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline dim3 threadIdx, blockIdx, blockDim, gridDim;  // Of the fiber that runs.

namespace emulator {

// A context switch. swapcontext() would do, but asks the kernel for the signal mask every time.
#if defined(__x86_64__)
using Context = void*;  // The stack pointer; the registers are on the stack.
extern "C" void emulator_switch(Context* from, Context to);
asm(R"(
.text
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
inline void Switch(Context* from, Context* to) { emulator_switch(from, *to); }
inline void Prepare(Context* context, std::vector<char>* stack, void (*entry)()) {
  auto top = reinterpret_cast<uintptr_t>(stack->data() + stack->size()) & ~uintptr_t{15};
  void** frame = reinterpret_cast<void**>(top) - 8;  // Six registers, entry, alignment.
  std::memset(frame, 0, 8 * sizeof(void*));
  frame[6] = reinterpret_cast<void*>(entry);
  *context = frame;
}
#else
using Context = ucontext_t;
inline void Switch(Context* from, Context* to) { swapcontext(from, to); }
inline void Prepare(Context* context, std::vector<char>* stack, void (*entry)()) {
  getcontext(context);
  context->uc_stack.ss_sp = stack->data();
  context->uc_stack.ss_size = stack->size();
  makecontext(context, entry, 0);
}
#endif

enum class State { kRuns, kAtWarp, kAtBlock, kDone };

struct Fiber {
  Context context;
  std::vector<char> stack;
  State state;
  unsigned instructions;  // Of the warp so far.
};

inline std::vector<Fiber> fibers;
inline Fiber* current;
inline Context scheduler;
inline std::function<void()> kernel;
inline std::mt19937 shuffler(1);

[[noreturn]] inline void Fail(const char* what) {
  std::fprintf(stderr, "emulator: %s (block %u, thread %u)\n", what, blockIdx.x, threadIdx.x);
  std::abort();
}

inline void Wait(State state) {
  current->state = state;
  Switch(&current->context, &scheduler);
}

inline void Main() {
  kernel();
  Wait(State::kDone);
}

inline void Start(Fiber* fiber) {
  fiber->stack.resize(128 << 10);
  fiber->state = State::kRuns;
  fiber->instructions = 0;
  Prepare(&fiber->context, &fiber->stack, Main);
}

// Runs a warp until all its threads wait for the block, or are done.
inline void RunWarp(unsigned warp) {
  unsigned order[32];
  std::iota(order, order + 32, warp * 32);
  for (;;) {
    std::shuffle(order, order + 32, shuffler);
    unsigned at_warp = 0;
    for (unsigned thread : order) {
      current = &fibers[thread];
      threadIdx.x = thread;
      if (current->state == State::kRuns) Switch(&scheduler, &current->context);
      at_warp += current->state == State::kAtWarp;
    }
    if (at_warp == 0) return;
    if (at_warp != 32) Fail("not all threads of a warp take part in its instruction");
    for (unsigned thread : order) fibers[thread].state = State::kRuns;
  }
}

inline void RunBlock(unsigned threads) {
  std::vector<unsigned> warps(threads / 32);
  std::iota(warps.begin(), warps.end(), 0);
  for (unsigned i = 0; i < threads; ++i) Start(&fibers[i]);
  for (;;) {
    std::shuffle(warps.begin(), warps.end(), shuffler);
    for (unsigned warp : warps) RunWarp(warp);
    unsigned done = 0;
    for (unsigned i = 0; i < threads; ++i) done += fibers[i].state == State::kDone;
    if (done == threads) return;
    if (done != 0) Fail("some threads wait for others that have ended");
    for (unsigned i = 0; i < threads; ++i) fibers[i].state = State::kRuns;
  }
}

inline void Launch(dim3 grid, unsigned threads, void*, std::function<void()> body) {
  if (threads % 32 != 0 || grid.x == 0 || grid.y == 0) Fail("an invalid launch");
#if defined(__SSE2__)
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(saved | 0x8040);
#endif
  kernel = std::move(body);
  gridDim = grid;
  blockDim = threads;
  if (fibers.size() < threads) fibers.resize(threads);
  std::vector<unsigned> blocks(grid.x * grid.y);
  std::iota(blocks.begin(), blocks.end(), 0);
  std::shuffle(blocks.begin(), blocks.end(), shuffler);
  for (unsigned block : blocks) {
    blockIdx = dim3(block % grid.x, block / grid.x);
    RunBlock(threads);
  }
#if defined(__SSE2__)
  _mm_setcsr(saved);
#endif
}

// The values that all lanes bring to an instruction of their warp. Two sets take turns: no lane is
// more than one instruction ahead of another.
inline const uint64_t* Exchange(uint64_t value) {
  static uint64_t slots[2][32][32];
  const unsigned thread = threadIdx.x;
  uint64_t* set = slots[current->instructions++ % 2][thread / 32];
  set[thread % 32] = value;
  Wait(State::kAtWarp);
  return set;
}

template <class T>
T Shuffle(T value, unsigned lane) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(value));
  const uint64_t* all = Exchange(bits);
  std::memcpy(&value, &all[lane], sizeof(value));
  return value;
}

}  // namespace emulator

inline void __syncthreads() { emulator::Wait(emulator::State::kAtBlock); }
inline void __threadfence() {}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int32_t __float_as_int(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
inline float __int_as_float(int32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
inline unsigned __ballot_sync(unsigned, bool predicate) {
  const uint64_t* all = emulator::Exchange(predicate);
  unsigned ballot = 0;
  for (int lane = 0; lane < 32; ++lane) ballot |= static_cast<unsigned>(all[lane]) << lane;
  return ballot;
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulator::Shuffle(value, threadIdx.x % 32 ^ mask);
}
template <class T>
T __shfl_up_sync(unsigned, T value, unsigned distance) {
  const unsigned lane = threadIdx.x % 32;
  return emulator::Shuffle(value, lane < distance ? lane : lane - distance);
}
template <class T>
T atomicAdd(T* place, T value) {
  const T old = *place;
  *place += value;
  return old;
}
template <class T>
T atomicMin(T* place, T value) {
  const T old = *place;
  if (value < old) *place = value;
  return old;
}

// The stream API: everything is done at once.
using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };
enum cudaMemcpyKind { cudaMemcpyDefault };
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                   cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
#define CUDART_CB
inline cudaError_t cudaStreamAddCallback(cudaStream_t stream,
                                         void (*function)(cudaStream_t, cudaError_t, void*),
                                         void* argument, unsigned) {
  function(stream, cudaSuccess, argument);
  return cudaSuccess;
}
inline cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }

#endif  // TF_REDSYNC_TESTS_GPU_EMULATOR_H_
