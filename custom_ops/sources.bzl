"""What the native library is made of: the one list for setup.py and for Bazel.

This file is Starlark and Python at once: plain constants only. Patterns are relative to the folder
of this file; `**` stands for any number of folders.
"""

# The algorithms. They include nothing of TensorFlow.
CORE_SOURCES = ["core/cpu/**/*.cc"]
CORE_HEADERS = ["core/**/*.h"]

# Op definitions and kernels, compiled against the installed TensorFlow.
OP_SOURCES = ["ops/**/*.cc", "kernels/*.cc"]
OP_HEADERS = ["ops/**/*.h", "kernels/**/*.h"]

# CUDA, compiled with nvcc where there is one, left out elsewhere. No TensorFlow either.
CUDA_SOURCES = ["core/gpu/**/*.cu"]
CUDA_HEADERS = ["core/gpu/**/*.cuh"]
# Kernels that call it, left out with it. C++ and TensorFlow, no CUDA header.
GPU_OP_SOURCES = ["kernels/gpu/*.cc"]

# A library of its own, which the launcher preloads into workers. Neither core nor TensorFlow.
PRELOAD_SOURCES = ["preload/*.cc"]

# No contraction to fused multiply-add: results equal those of separate operations, bit for bit.
FLAGS = ["-O3", "-std=c++17", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-DNDEBUG"]
# After these, for test programs: they take longer to compile than to run.
TEST_FLAGS = ["-Og"]
# TensorFlow deprecates names for which its older versions have no replacement.
QUIET = ["-Wno-psabi", "-Wno-attributes", "-Wno-deprecated-declarations"]

# Machine code for those of these that nvcc knows, and PTX of the last for whatever comes later.
CUDA_ARCHITECTURES = ["70", "75", "80", "86", "89", "90", "100", "110", "120"]
CUDA_FLAGS = [
    "-O3",
    "-std=c++17",
    "--fmad=false",
    "-ftz=true",  # Denormals are zero, as on TensorFlow's threads.
    "-DNDEBUG",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-ffp-contract=off",
]
