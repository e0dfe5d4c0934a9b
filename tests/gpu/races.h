// Notifications from the emulator to the race detector (races.cc) or the byte counter (traffic.cc).
// They are empty without both.
#ifndef TF_REDSYNC_TESTS_GPU_RACES_H_
#define TF_REDSYNC_TESTS_GPU_RACES_H_

#include <cstddef>

namespace emulator {

#ifdef REDSYNC_GPU_RACES
void StartLaunch(unsigned threads);
void StartBlock(unsigned number, unsigned slot);  // `slot` in a cooperative launch.
void EnterBlock(unsigned slot);
void LeaveBlock();
void PassBarrier();            // All threads of the block have reached it.
void PassWarp(unsigned warp);  // All lanes are at a __syncwarp().
void Fence();
void TouchAtomically(const void* memory, size_t bytes, const void* place);
#else
inline void StartLaunch(unsigned) {}
inline void StartBlock(unsigned, unsigned) {}
inline void EnterBlock(unsigned) {}
inline void LeaveBlock() {}
inline void PassBarrier() {}
inline void PassWarp(unsigned) {}
inline void Fence() {}
inline void TouchAtomically(const void*, size_t, const void*) {}
#endif

// Whether memory belongs to the thread (its stack and the emulator's data) or to the block.
bool IsPrivate(const void* memory);
bool IsShared(const void* memory);

}  // namespace emulator

#endif  // TF_REDSYNC_TESTS_GPU_RACES_H_
