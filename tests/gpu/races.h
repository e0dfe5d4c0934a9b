// What the emulator tells the detector of races, races.cc, or who counts bytes, traffic.cc; nothing
// where both are left out.
#ifndef TF_REDSYNC_TESTS_GPU_RACES_H_
#define TF_REDSYNC_TESTS_GPU_RACES_H_

#include <cstddef>

namespace emulator {

#ifdef REDSYNC_GPU_RACES
void StartLaunch(unsigned threads);
void StartBlock(unsigned number, unsigned slot);  // Of those that take turns.
void EnterBlock(unsigned slot);
void LeaveBlock();
void PassBarrier();            // All threads of the block are at it.
void PassWarp(unsigned warp);  // All lanes are at a __syncwarp().
void Fence();
void TouchAtomically(const void* memory, size_t bytes, const void* place);  // In the code.
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

// Whether memory is the thread's own, its stack and what the emulator gives it, or the block's.
bool IsPrivate(const void* memory);
bool IsShared(const void* memory);

}  // namespace emulator

#endif  // TF_REDSYNC_TESTS_GPU_RACES_H_
