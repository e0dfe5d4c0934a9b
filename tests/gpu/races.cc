// Finds races of emulated kernels: a detector of what no synchronisation orders.
//
// g++ -fsanitize=thread puts a call before every access to memory; here is what it calls, in the
// place of its own run-time library. Two accesses of a word race if one of them writes, not both
// are atomic, different threads make them, and nothing orders them. Threads of a block are ordered
// by __syncthreads(), those of a warp also by __syncwarp() (a shuffle or a ballot orders no
// memory), and blocks by a fence and an atomic on one side and an atomic of the same word and a
// fence on the other: fences are sequentially consistent, so what a thread has fenced before a
// barrier another one may publish behind it. Launches are ordered. Shared memory starts every block
// unwritten.
#include "races.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "fibers.h"

// The library's own zeros: where `__shared__` variables are.
extern char __bss_start __attribute__((visibility("hidden")));
extern char _end __attribute__((visibility("hidden")));

namespace emulator {
namespace {

using Time = uint64_t;

enum Kind { kRead, kWrite, kAtomic };

// An access of one thread; of reads perhaps one of several, see `Word`.
struct Access {
  Time time = 0;  // 0: none.
  unsigned launch = 0, block = 0, thread = 0;
  const void* place = nullptr;  // In the code.
};

struct Word {
  Access write, atomic;
  std::array<Access, 4> reads;  // Of different threads, if possible of different warps.
  unsigned next = 0;
};

// What of a block's accesses others know: those of each thread until a time.
struct Published {
  Time all;
  std::vector<Time> of_thread;
};
using Known = std::map<unsigned, std::shared_ptr<const Published>>;  // By block.

struct Thread {
  Time fence = 0, barrier_at_fence = 0;
  Known known;  // Of other blocks, since a fence.
};

// An atomic access, after which a fence makes known what was published before.
struct Acquired {
  unsigned thread;
  Time time;
  Known known;
};

constexpr size_t kWords = 1024;
std::unordered_map<uintptr_t, std::array<Word, kWords>> pages;
std::unordered_map<uintptr_t, Known> published;  // By word, in this launch.
std::vector<Thread> threads;
std::vector<Time> warps;  // Of the last __syncwarp().
std::vector<Acquired> acquired;
Published fenced;  // Before the last barrier.
Known known;       // To all threads, since a barrier.
Time now = 1, barrier = 0;
unsigned launch = 0, block = 0;
bool running = false;  // A kernel runs, and none of the functions here.

bool IsShared(uintptr_t at) {
  return at >= reinterpret_cast<uintptr_t>(&__bss_start) && at < reinterpret_cast<uintptr_t>(&_end);
}

void Merge(const Known& from, Known* to) {
  for (const auto& [of, what] : from) {
    auto& place = (*to)[of];
    if (place == nullptr || what->all >= place->all) place = what;
  }
}

bool IsKnown(const Known& here, const Access& access) {
  const auto found = here.find(access.block);
  if (found == here.end()) return false;
  return access.time <= std::max(found->second->all, found->second->of_thread[access.thread]);
}

// Whether an access of this launch comes before whatever this thread does now.
bool IsOrdered(const Access& access) {
  const unsigned thread = threadIdx.x;
  if (access.block != block)
    return IsKnown(known, access) || IsKnown(threads[thread].known, access);
  if (access.thread == thread || access.time <= barrier) return true;
  return access.thread / 32 == thread / 32 && access.time <= warps[thread / 32];
}

const char* Name(Kind kind) {
  return kind == kRead ? "read" : kind == kWrite ? "write" : "atomic access";
}

void Describe(const char* what, unsigned of_block, unsigned thread, const void* place) {
  Dl_info info;
  const bool found = dladdr(place, &info) != 0;
  const auto base = found ? reinterpret_cast<uintptr_t>(info.dli_fbase) : 0;
  std::fprintf(stderr, "  %s, block %u, thread %u, at %s+0x%zx\n", what, of_block, thread,
               found ? info.dli_fname : "?", reinterpret_cast<uintptr_t>(place) - base);
}

[[noreturn]] void Fail(const char* what, Kind kind, const void* place, const Access* other,
                       Kind other_kind) {
  std::fprintf(stderr, "emulator: %s\n", what);
  Describe(Name(kind), block, threadIdx.x, place);
  if (other != nullptr) Describe(Name(other_kind), other->block, other->thread, other->place);
  std::abort();
}

void Check(const Access& other, Kind other_kind, Kind kind, const void* place, bool shared) {
  if (other.time == 0 || other.launch != launch || (shared && other.block != block)) return;
  if (!IsOrdered(other)) Fail("a race", kind, place, &other, other_kind);
}

void Note(Word* word, Kind kind, const Access& access) {
  if (kind == kWrite) {
    word->write = access;
  } else if (kind == kAtomic) {
    word->atomic = access;
  } else {
    for (Access& read : word->reads) {
      const bool same = read.thread == access.thread && read.block == access.block;
      if (read.launch != launch || read.time == 0 || same) return void(read = access);
    }
    word->reads[word->next++ % word->reads.size()] = access;
  }
}

void TouchWord(uintptr_t at, Kind kind, const void* place) {
  const uintptr_t index = at / 4;
  Word& word = pages[index / kWords][index % kWords];
  const bool shared = IsShared(at);
  const auto is_here = [&](const Access& a) { return a.launch == launch && a.block == block; };
  if (shared && kind != kWrite && !is_here(word.write) && !is_here(word.atomic)) {
    Fail("shared memory is read that this block has not written", kind, place, nullptr, kRead);
  }
  Check(word.write, kWrite, kind, place, shared);
  if (kind != kAtomic) Check(word.atomic, kAtomic, kind, place, shared);
  if (kind != kRead) {
    for (const Access& read : word.reads) Check(read, kRead, kind, place, shared);
  }
  Note(&word, kind, {now++, launch, block, threadIdx.x, place});
}

void Touch(const void* memory, size_t bytes, Kind kind, const void* place) {
  if (!running || bytes == 0) return;
  if (IsPrivate(memory)) return;
  const auto at = reinterpret_cast<uintptr_t>(memory);
  running = false;  // The containers' functions may be those that were compiled with the hooks.
  for (uintptr_t word = at / 4 * 4; word < at + bytes; word += 4) TouchWord(word, kind, place);
  running = true;
}

// A thread publishes what was fenced before a barrier, and behind it by itself.
void Publish(uintptr_t word) {
  const Thread& thread = threads[threadIdx.x];
  auto what = std::make_shared<Published>(fenced);
  if (thread.fence > barrier) {
    what->all = std::max(what->all, thread.barrier_at_fence);
    what->of_thread[threadIdx.x] = thread.fence;
  }
  published[word][block] = std::move(what);
}

}  // namespace

void StartLaunch(unsigned of_threads) {
  ++launch;
  published.clear();
  threads.assign(of_threads, {});
  warps.assign(of_threads / 32, 0);
}

void StartBlock(unsigned number) {
  block = number;
  running = true;
  barrier = now++;
  std::fill(threads.begin(), threads.end(), Thread());
  std::fill(warps.begin(), warps.end(), 0);
  acquired.clear();
  known.clear();
  fenced = {0, std::vector<Time>(threads.size(), 0)};
}

void EndBlock() { running = false; }

void PassBarrier() {
  for (size_t i = 0; i < threads.size(); ++i) {
    Thread& thread = threads[i];
    if (thread.fence > barrier) {
      fenced.all = std::max(fenced.all, thread.barrier_at_fence);
      fenced.of_thread[i] = thread.fence;
    }
    Merge(thread.known, &known);
    thread.known.clear();
  }
  barrier = now++;
}

void PassWarp(unsigned warp) { warps[warp] = now++; }

void Fence() {
  Thread& thread = threads[threadIdx.x];
  thread.fence = now++;
  thread.barrier_at_fence = barrier;
  for (const Acquired& a : acquired) {
    if (a.thread == threadIdx.x || a.time <= barrier) Merge(a.known, &thread.known);
  }
}

void TouchAtomically(const void* memory, size_t bytes, const void* place) {
  if (!running) return;
  Touch(memory, bytes, kAtomic, place);
  const auto at = reinterpret_cast<uintptr_t>(memory);
  if (IsShared(at)) return;
  const auto found = published.find(at);
  if (found != published.end()) acquired.push_back({threadIdx.x, now++, found->second});
  Publish(at);
}

}  // namespace emulator

#define REDSYNC_HOOKS(bytes)                                                   \
  void __tsan_read##bytes(void* at) {                                          \
    emulator::Touch(at, bytes, emulator::kRead, __builtin_return_address(0));  \
  }                                                                            \
  void __tsan_write##bytes(void* at) {                                         \
    emulator::Touch(at, bytes, emulator::kWrite, __builtin_return_address(0)); \
  }                                                                            \
  void __tsan_unaligned_read##bytes(void* at) {                                \
    emulator::Touch(at, bytes, emulator::kRead, __builtin_return_address(0));  \
  }                                                                            \
  void __tsan_unaligned_write##bytes(void* at) {                               \
    emulator::Touch(at, bytes, emulator::kWrite, __builtin_return_address(0)); \
  }

extern "C" {
REDSYNC_HOOKS(1)
REDSYNC_HOOKS(2)
REDSYNC_HOOKS(4)
REDSYNC_HOOKS(8)
REDSYNC_HOOKS(16)
void __tsan_read_range(void* at, size_t bytes) {
  emulator::Touch(at, bytes, emulator::kRead, __builtin_return_address(0));
}
void __tsan_write_range(void* at, size_t bytes) {
  emulator::Touch(at, bytes, emulator::kWrite, __builtin_return_address(0));
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_read(void*) {}
void __tsan_vptr_update(void*, void*) {}
// Of the host's std::atomic, and of the locks of its local statics.
int __tsan_atomic32_load(const volatile int* at, int) { return *at; }
void __tsan_atomic32_store(volatile int* at, int value, int) { *at = value; }
char __tsan_atomic8_load(const volatile char* at, int) { return *at; }
void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  return std::memcpy(to, from, bytes);
}
void* __tsan_memset(void* to, int value, size_t bytes) { return std::memset(to, value, bytes); }
}
