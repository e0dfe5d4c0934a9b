// Race detector for emulated kernels.
//
// g++ -fsanitize=thread inserts a call before every memory access; this file defines the called
// functions instead of the sanitizer's runtime library. Two accesses of a word race if at least one
// writes, not both are atomic, different threads make them, and no synchronization orders them.
// Threads of a block are ordered by __syncthreads(), those of a warp also by __syncwarp() (a
// shuffle or a ballot orders no memory). Blocks are ordered by a fence and an atomic on one side,
// and an atomic of the same word and a fence on the other. Fences are sequentially consistent, so
// another thread may publish after a barrier what a thread has fenced before it. Launches are
// ordered. Shared memory of every block starts unwritten.
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
#include "hooks.h"

namespace emulator {
namespace {

using Time = uint64_t;

enum Kind { kRead, kWrite, kAtomic };

// An access of one thread; for reads possibly one of several, see `Word`.
struct Access {
  Time time = 0;  // 0: none.
  unsigned launch = 0, block = 0, thread = 0;
  const void* place = nullptr;  // Program counter.
};

struct Word {
  Access write, atomic;
  std::array<Access, 4> reads;  // By different threads, if possible of different warps.
  unsigned next = 0;
};

// The accesses of a block that other blocks know: those of each thread up to a time.
struct Published {
  Time all;
  std::vector<Time> of_thread;
};
using Known = std::map<unsigned, std::shared_ptr<const Published>>;  // By block.

struct Thread {
  Time fence = 0, barrier_at_fence = 0;
  Known known;  // Accesses of other blocks, since a fence.
};

// An atomic access; a later fence makes earlier published accesses known.
struct Acquired {
  unsigned thread;
  Time time;
  Known known;
};

// A block that has started and not ended.
struct Block {
  unsigned number;
  Time barrier;
  std::vector<Thread> threads;
  std::vector<Time> warps;  // Time of the last __syncwarp().
  std::vector<Acquired> acquired;
  Published fenced;  // Before the last barrier.
  Known known;       // Known to all threads since a barrier.
};

constexpr size_t kWords = 1024;
EMULATOR_STATE std::unordered_map<uintptr_t, std::array<Word, kWords>> pages;
EMULATOR_STATE std::unordered_map<uintptr_t, Known> published;  // By word, in this launch.
EMULATOR_STATE std::vector<Block> blocks;  // One, or all of a cooperative launch.
EMULATOR_STATE unsigned slot = 0;          // Of the running block.
EMULATOR_STATE Block* here = nullptr;
EMULATOR_STATE Time now = 1;
EMULATOR_STATE unsigned launch = 0, of_block = 0;  // Threads.
EMULATOR_STATE bool running = false;               // A kernel runs, and no function of this file.

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

// Whether an access of this launch happens before the current operation of this thread.
bool IsOrdered(const Access& access) {
  const unsigned thread = threadIdx.x;
  if (access.block != here->number) {
    return IsKnown(here->known, access) || IsKnown(here->threads[thread].known, access);
  }
  if (access.thread == thread || access.time <= here->barrier) return true;
  return access.thread / 32 == thread / 32 && access.time <= here->warps[thread / 32];
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
  Describe(Name(kind), here->number, threadIdx.x, place);
  if (other != nullptr) Describe(Name(other_kind), other->block, other->thread, other->place);
  std::abort();
}

void Check(const Access& other, Kind other_kind, Kind kind, const void* place, bool shared) {
  if (other.time == 0 || other.launch != launch || (shared && other.block != here->number)) return;
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
  const bool shared = IsShared(reinterpret_cast<const void*>(at));
  const uintptr_t page = index / kWords + (shared ? uintptr_t{slot} << 52 : 0);
  Word& word = pages[page][index % kWords];
  const auto is_here = [](const Access& a) {
    return a.launch == launch && a.block == here->number;
  };
  if (shared && kind != kWrite && !is_here(word.write) && !is_here(word.atomic)) {
    Fail("shared memory is read that this block has not written", kind, place, nullptr, kRead);
  }
  Check(word.write, kWrite, kind, place, shared);
  if (kind != kAtomic) Check(word.atomic, kAtomic, kind, place, shared);
  if (kind != kRead) {
    for (const Access& read : word.reads) Check(read, kRead, kind, place, shared);
  }
  Note(&word, kind, {now++, launch, here->number, threadIdx.x, place});
}

void TouchAll(const void* memory, size_t bytes, Kind kind, const void* place) {
  if (!running || bytes == 0) return;
  if (IsPrivate(memory)) return;
  const auto at = reinterpret_cast<uintptr_t>(memory);
  running = false;  // The linker may choose container functions with hooks.
  for (uintptr_t word = at / 4 * 4; word < at + bytes; word += 4) TouchWord(word, kind, place);
  running = true;
}

// A thread publishes accesses that were fenced before a barrier, and its own ones after it.
void Publish(uintptr_t word) {
  const Thread& thread = here->threads[threadIdx.x];
  auto what = std::make_shared<Published>(here->fenced);
  if (thread.fence > here->barrier) {
    what->all = std::max(what->all, thread.barrier_at_fence);
    what->of_thread[threadIdx.x] = thread.fence;
  }
  published[word][here->number] = std::move(what);
}

}  // namespace

void Touch(const void* memory, size_t bytes, bool writes, const void* place) {
  TouchAll(memory, bytes, writes ? kWrite : kRead, place);
}

void StartLaunch(unsigned threads) {
  ++launch;
  of_block = threads;
  published.clear();
}

void StartBlock(unsigned number, unsigned in_slot) {
  if (blocks.size() <= in_slot) blocks.resize(in_slot + 1);
  EnterBlock(in_slot);
  here->number = number;
  here->barrier = now++;
  here->threads.assign(of_block, {});
  here->warps.assign(of_block / 32, 0);
  here->acquired.clear();
  here->known.clear();
  here->fenced = {0, std::vector<Time>(of_block, 0)};
}

void EnterBlock(unsigned in_slot) {
  slot = in_slot;
  here = &blocks[slot];
  running = true;
}

void LeaveBlock() { running = false; }

void PassBarrier() {
  for (size_t i = 0; i < here->threads.size(); ++i) {
    Thread& thread = here->threads[i];
    if (thread.fence > here->barrier) {
      here->fenced.all = std::max(here->fenced.all, thread.barrier_at_fence);
      here->fenced.of_thread[i] = thread.fence;
    }
    Merge(thread.known, &here->known);
    thread.known.clear();
  }
  here->barrier = now++;
}

void PassWarp(unsigned warp) { here->warps[warp] = now++; }

void Fence() {
  Thread& thread = here->threads[threadIdx.x];
  thread.fence = now++;
  thread.barrier_at_fence = here->barrier;
  for (const Acquired& a : here->acquired) {
    if (a.thread == threadIdx.x || a.time <= here->barrier) Merge(a.known, &thread.known);
  }
}

void TouchAtomically(const void* memory, size_t bytes, const void* place) {
  if (!running) return;
  TouchAll(memory, bytes, kAtomic, place);
  const auto at = reinterpret_cast<uintptr_t>(memory);
  if (IsShared(reinterpret_cast<const void*>(at))) return;
  const auto found = published.find(at);
  if (found != published.end()) here->acquired.push_back({threadIdx.x, now++, found->second});
  Publish(at);
}

}  // namespace emulator
