// What the library says about itself.

#include "custom_ops/core/cpu/pass.h"

// The build passes the version of the TensorFlow whose headers it uses; its ABI is that version's.
#ifndef REDSYNC_TENSORFLOW_VERSION
#error "Define REDSYNC_TENSORFLOW_VERSION as a string, for example \"2.21.0\"."
#endif

// Read from the file before it is loaded: only that TensorFlow may load it.
extern "C" __attribute__((used, visibility("default"))) const char redsync_build_marker[] =
    "REDSYNC_BUILT_FOR_TENSORFLOW=" REDSYNC_TENSORFLOW_VERSION ";";

// Instruction set in use: "plain", "avx2" or "avx512".
extern "C" __attribute__((visibility("default"))) const char* redsync_simd() {
  return redsync::Passes().name;
}
