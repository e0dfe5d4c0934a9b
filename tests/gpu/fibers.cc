// Each fiber runs until it needs other threads (a barrier of the block, an instruction of the
// warp), in shuffled order. Code with a barrier that not all threads reach aborts.
//
// Blocks run one after the other. Blocks of a cooperative launch alternate: when one waits for
// others, its shared memory is saved, and the next one continues.
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

// Zeros in the library's address space, where `__shared__` variables are, apart from the emulator's
// mutable variables.
extern char __bss_start __attribute__((visibility("hidden")));
extern char _end __attribute__((visibility("hidden")));

EMULATOR_STATE dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

EMULATOR_STATE int driver_version = 13010;
EMULATOR_STATE int launches = 0;

namespace {

// A context switch. swapcontext() would work, but calls the kernel for the signal mask every time.
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

enum class State { kRuns, kAtWarp, kAtBlock, kYields, kDone };

struct Fiber {
  Context context;
  std::vector<char> stack;
  State state;
  unsigned instructions;  // Count of the warp so far.
  bool syncs;             // The last one is a __syncwarp().
};

// A block that has started and not ended.
struct Block {
  dim3 index;
  std::vector<Fiber> fibers;
  std::vector<char> shared;  // Saved while another block runs.
  bool is_done;
};

constexpr int kMaxIdle = 100;  // Rounds without progress.

EMULATOR_STATE std::vector<Block> blocks;  // One, or all of a cooperative launch.
EMULATOR_STATE Block* block;               // The running block.
EMULATOR_STATE Fiber* current;
EMULATOR_STATE Context scheduler;
EMULATOR_STATE std::function<void()> kernel;
EMULATOR_STATE std::mt19937 shuffler(1);
EMULATOR_STATE unsigned window = 0;    // See emulator_window().
EMULATOR_STATE uint64_t progress = 0;  // Number of passed barriers and ended blocks.

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

// Runs a warp until all its threads wait for the block, or have ended.
void RunWarp(unsigned warp) {
  unsigned order[32];
  std::iota(order, order + 32, warp * 32);
  for (;;) {
    std::shuffle(order, order + 32, shuffler);
    unsigned at_warp = 0;
    for (unsigned thread : order) {
      current = &block->fibers[thread];
      threadIdx.x = thread;
      if (current->state == State::kRuns) Switch(&scheduler, &current->context);
      at_warp += current->state == State::kAtWarp;
    }
    if (at_warp == 0) return;
    if (at_warp != 32) Fail("not all threads of a warp take part in its instruction");
    unsigned syncs = 0;
    for (unsigned thread : order) syncs += std::exchange(block->fibers[thread].syncs, false);
    if (syncs != 0 && syncs != 32) Fail("lanes of a warp are at different instructions");
    if (syncs == 32) PassWarp(warp);
    for (unsigned thread : order) block->fibers[thread].state = State::kRuns;
  }
}

// Runs a block until it ends, or waits for other blocks.
void RunBlock(unsigned threads) {
  std::vector<unsigned> warps(threads / 32);
  std::iota(warps.begin(), warps.end(), 0);
  for (;;) {
    std::shuffle(warps.begin(), warps.end(), shuffler);
    for (unsigned warp : warps) RunWarp(warp);
    unsigned done = 0, yield = 0;
    for (unsigned i = 0; i < threads; ++i) {
      Fiber& fiber = block->fibers[i];
      done += fiber.state == State::kDone;
      if (fiber.state != State::kYields) continue;
      ++yield;
      fiber.state = State::kRuns;  // When the block runs again.
    }
    if (yield != 0) return;
    ++progress;
    block->is_done = done == threads;
    if (block->is_done) return;
    if (done != 0) Fail("some threads wait for others that have ended");
    PassBarrier();
    for (unsigned i = 0; i < threads; ++i) block->fibers[i].state = State::kRuns;
  }
}

void Begin(unsigned slot, dim3 index, unsigned threads) {
  block = &blocks[slot];
  block->index = blockIdx = index;
  block->is_done = false;
  if (block->fibers.size() < threads) block->fibers.resize(threads);
  for (unsigned i = 0; i < threads; ++i) Start(&block->fibers[i]);
  StartBlock(index.y * gridDim.x + index.x, slot);
}

// Not by memcpy(), for which the address sanitizer would check the gaps between variables.
__attribute__((no_sanitize("address", "undefined"))) void Copy(const volatile char* from,
                                                               volatile char* to, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) to[i] = from[i];
}

void TakeTurns(unsigned threads) {
  const size_t bytes = &_end - &__bss_start;
  std::vector<char> hosts(bytes);  // They include host variables.
  Copy(&__bss_start, hosts.data(), bytes);
  std::vector<unsigned> waiting(gridDim.x);
  std::iota(waiting.begin(), waiting.end(), 0);
  if (blocks.size() < gridDim.x) blocks.resize(gridDim.x);
  for (unsigned b : waiting) {
    Begin(b, dim3(b, 0), threads);
    blocks[b].shared.assign(bytes, '\xa5');
    LeaveBlock();
  }
  for (int idle = 0; !waiting.empty(); ++idle) {
    const uint64_t before = progress;
    std::shuffle(waiting.begin(), waiting.end(), shuffler);
    for (unsigned b : waiting) {
      block = &blocks[b];
      blockIdx = block->index;
      Copy(block->shared.data(), &__bss_start, bytes);
      EnterBlock(b);
      RunBlock(threads);
      LeaveBlock();
      Copy(&__bss_start, block->shared.data(), bytes);
    }
    if (progress != before) idle = 0;
    if (idle == kMaxIdle) Fail("blocks wait for each other");
    waiting.erase(std::remove_if(waiting.begin(), waiting.end(),
                                 [](unsigned b) { return blocks[b].is_done; }),
                  waiting.end());
  }
  Copy(hosts.data(), &__bss_start, bytes);
}

// Runs all blocks inside the window, one after the other.
void RunInTurn(unsigned threads) {
  std::vector<dim3> order;
  for (unsigned y = 0; y < gridDim.y; ++y) {
    for (unsigned x = 0; x < gridDim.x; ++x) {
      if (window != 0 && x == window && gridDim.x > 2 * window) x = gridDim.x - window;
      order.push_back(dim3(x, y));
    }
  }
  if (blocks.empty()) blocks.resize(1);
  std::shuffle(order.begin(), order.end(), shuffler);
  for (dim3 index : order) {
    Begin(0, index, threads);
    RunBlock(threads);
    if (!block->is_done) Fail("a block waits for others that are not launched together with it");
    LeaveBlock();
  }
}

}  // namespace

void Launch(dim3 grid, unsigned threads, void*, std::function<void()> body, bool together) {
  if (threads % 32 != 0 || grid.x == 0 || grid.y == 0) Fail("an invalid launch");
  if (together && (grid.y != 1 || grid.x > kMultiprocessors * kBlocksAtOnce)) {
    Fail("more blocks are launched together than fit");
  }
#if defined(__SSE2__)
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(saved | 0x8040);
#endif
  ++launches;
  kernel = std::move(body);
  gridDim = grid;
  blockDim = threads;
  StartLaunch(threads);
  if (!together) {
    RunInTurn(threads);
  } else if (window == 0) {
    TakeTurns(threads);
  }
#if defined(__SSE2__)
  _mm_setcsr(saved);
#endif
}

// The values that all lanes pass to an instruction of their warp. Two sets alternate: no lane is
// more than one instruction ahead of another.
const uint64_t* Exchange(uint64_t value) {
  EMULATOR_STATE static uint64_t slots[2][32][32];
  const unsigned thread = threadIdx.x;
  uint64_t* set = slots[current->instructions++ % 2][thread / 32];
  set[thread % 32] = value;
  Wait(State::kAtWarp);
  return set;
}

void WaitForBlock() { Wait(State::kAtBlock); }
void WaitForOthers() { Wait(State::kYields); }

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

bool IsShared(const void* memory) { return memory >= &__bss_start && memory < &_end; }

}  // namespace emulator

// Every later launch runs only its first and its last `blocks` blocks; 0 means all. This tests
// kernels at the end of tensors that are too large to compute or store. Cooperative launches are
// skipped.
extern "C" void emulator_window(unsigned blocks) { emulator::window = blocks; }

// The next status query returns a failure.
namespace {
EMULATOR_STATE bool fails = false;
}
extern "C" void emulator_driver(int version) { emulator::driver_version = version; }
extern "C" int emulator_launches() { return emulator::launches; }  // Number so far.
extern "C" void emulator_fail() { fails = true; }

namespace emulator {
cudaError_t TakeError() {
  return std::exchange(fails, false) ? cudaErrorLaunchFailure : cudaSuccess;
}
}  // namespace emulator
