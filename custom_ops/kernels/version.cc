// Facts about the build: TensorFlow's version, GPUs, instruction set.

#include "custom_ops/core/cpu/pass.h"

// The build passes the version of the TensorFlow whose headers, and therefore ABI, it uses.
#ifndef REDSYNC_TENSORFLOW_VERSION
#error "Define REDSYNC_TENSORFLOW_VERSION as a string, for example \"2.21.0\"."
#endif

// Read from the file before it is loaded, because only that TensorFlow may load it.
extern "C" __attribute__((used, visibility("default"))) const char redsync_build_marker[] =
    "REDSYNC_BUILT_FOR_TENSORFLOW=" REDSYNC_TENSORFLOW_VERSION ";";

// The build passes the GPUs of its kernels, or the reason for their absence.
#ifndef REDSYNC_GPU_BUILD
#define REDSYNC_GPU_BUILD "none: not asked for by this build"
#endif

// Returns, for example, "CUDA 13.0: sm_75, sm_80 and PTX of 9.0", or "none: " and the reason.
extern "C" __attribute__((visibility("default"))) const char* redsync_gpu() {
  return REDSYNC_GPU_BUILD;
}

// Returns the instruction set in use: "plain", "avx2" or "avx512".
extern "C" __attribute__((visibility("default"))) const char* redsync_simd() {
  return redsync::Passes().name;
}
