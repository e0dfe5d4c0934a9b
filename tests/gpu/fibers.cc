// Each fiber runs until it needs the others (a barrier of the block, an instruction of the warp),
// and in which order is shuffled. Code that waits where not all threads come aborts.
#include "fibers.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "races.h"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

int driver_version = 13010;
int launches = 0;

namespace {

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
void Switch(Context* from, Context* to) { emulator_switch(from, *to); }
void Prepare(Context* context, std::vector<char>* stack, void (*entry)()) {
  auto top = reinterpret_cast<uintptr_t>(stack->data() + stack->size()) & ~uintptr_t{15};
  void** frame = reinterpret_cast<void**>(top) - 8;  // Six registers, entry, alignment.
  std::memset(frame, 0, 8 * sizeof(void*));
  frame[6] = reinterpret_cast<void*>(entry);
  *context = frame;
}
#else
using Context = ucontext_t;
void Switch(Context* from, Context* to) { swapcontext(from, to); }
void Prepare(Context* context, std::vector<char>* stack, void (*entry)()) {
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
  bool syncs;             // The last one is a __syncwarp().
};

std::vector<Fiber> fibers;
Fiber* current;
Context scheduler;
std::function<void()> kernel;
std::mt19937 shuffler(1);
unsigned window = 0;  // See emulator_window().

[[noreturn]] void Fail(const char* what) {
  std::fprintf(stderr, "emulator: %s (block %u, thread %u)\n", what, blockIdx.x, threadIdx.x);
  std::abort();
}

void Wait(State state) {
  current->state = state;
  Switch(&current->context, &scheduler);
}

void Main() {
  kernel();
  Wait(State::kDone);
}

void Start(Fiber* fiber) {
  fiber->stack.resize(128 << 10);
  fiber->state = State::kRuns;
  fiber->instructions = 0;
  fiber->syncs = false;
  Prepare(&fiber->context, &fiber->stack, Main);
}

// Runs a warp until all its threads wait for the block, or are done.
void RunWarp(unsigned warp) {
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
    unsigned syncs = 0;
    for (unsigned thread : order) syncs += std::exchange(fibers[thread].syncs, false);
    if (syncs != 0 && syncs != 32) Fail("lanes of a warp are at different instructions");
    if (syncs == 32) PassWarp(warp);
    for (unsigned thread : order) fibers[thread].state = State::kRuns;
  }
}

void RunBlock(unsigned threads) {
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
    PassBarrier();
    for (unsigned i = 0; i < threads; ++i) fibers[i].state = State::kRuns;
  }
}

}  // namespace

void Launch(dim3 grid, unsigned threads, void*, std::function<void()> body) {
  if (threads % 32 != 0 || grid.x == 0 || grid.y == 0) Fail("an invalid launch");
#if defined(__SSE2__)
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(saved | 0x8040);
#endif
  ++launches;
  kernel = std::move(body);
  gridDim = grid;
  blockDim = threads;
  if (fibers.size() < threads) fibers.resize(threads);
  StartLaunch(threads);
  std::vector<unsigned> blocks;
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; ++x) {
      if (window != 0 && x == window && grid.x > 2 * window) x = grid.x - window;
      blocks.push_back(y * grid.x + x);
    }
  }
  std::shuffle(blocks.begin(), blocks.end(), shuffler);
  for (unsigned block : blocks) {
    blockIdx = dim3(block % grid.x, block / grid.x);
    StartBlock(block);
    RunBlock(threads);
    EndBlock();
  }
#if defined(__SSE2__)
  _mm_setcsr(saved);
#endif
}

// The values that all lanes bring to an instruction of their warp. Two sets take turns: no lane is
// more than one instruction ahead of another.
const uint64_t* Exchange(uint64_t value) {
  static uint64_t slots[2][32][32];
  const unsigned thread = threadIdx.x;
  uint64_t* set = slots[current->instructions++ % 2][thread / 32];
  set[thread % 32] = value;
  Wait(State::kAtWarp);
  return set;
}

void WaitForBlock() { Wait(State::kAtBlock); }

void SyncWarp() {
  current->syncs = true;
  Exchange(0);
}

bool IsPrivate(const void* memory) {
  const auto* at = static_cast<const char*>(memory);
  const auto is_in = [at](const void* begin, size_t bytes) {
    return at >= begin && at < static_cast<const char*>(begin) + bytes;
  };
  return is_in(current->stack.data(), current->stack.size()) || is_in(&kernel, sizeof(kernel)) ||
         is_in(&threadIdx, sizeof(dim3)) || is_in(&blockIdx, sizeof(dim3)) ||
         is_in(&blockDim, sizeof(dim3)) || is_in(&gridDim, sizeof(dim3));
}

}  // namespace emulator

// Of every launch that follows, only the first and the last `blocks` blocks are run; 0: all. So
// kernels can be seen at the end of a tensor that is larger than what can be computed, or stored.
extern "C" void emulator_window(unsigned blocks) { emulator::window = blocks; }

// The next status that is asked for is a failure.
namespace {
bool fails = false;
}
extern "C" void emulator_driver(int version) { emulator::driver_version = version; }
extern "C" int emulator_launches() { return emulator::launches; }  // So far.
extern "C" void emulator_fail() { fails = true; }

namespace emulator {
cudaError_t TakeError() {
  return std::exchange(fails, false) ? cudaErrorLaunchFailure : cudaSuccess;
}
}  // namespace emulator
