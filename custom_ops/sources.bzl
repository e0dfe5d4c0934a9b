"""Sources and flags of the native library, shared by setup.py and Bazel.

This file is valid Starlark and Python, so it has plain constants only. Patterns are relative to the
folder of this file; `**` matches any number of folders.
"""

# The algorithms, which do not include TensorFlow.
CORE_SOURCES = ["core/cpu/**/*.cc"]
CORE_HEADERS = ["core/**/*.h"]

# Op definitions and kernels, compiled against the installed TensorFlow.
OP_SOURCES = ["ops/**/*.cc", "kernels/*.cc"]
OP_HEADERS = ["ops/**/*.h", "kernels/**/*.h"]

# CUDA sources, compiled if there is an nvcc. They do not include TensorFlow.
CUDA_SOURCES = ["core/gpu/**/*.cu"]
CUDA_HEADERS = ["core/gpu/**/*.cuh"]
# Kernels that call the CUDA sources, in C++ without CUDA headers; omitted without nvcc.
GPU_OP_SOURCES = ["kernels/gpu/*.cc"]

# A separate library, which the launcher preloads into workers, without core and TensorFlow.
PRELOAD_SOURCES = ["preload/*.cc"]

# No contraction to fused multiply-add, so that results equal those of separate operations.
FLAGS = ["-O3", "-std=c++17", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-DNDEBUG"]
# Added for test programs, which take longer to compile than to run.
TEST_FLAGS = ["-Og"]
# TensorFlow deprecates names for which its older versions have no replacement.
QUIET = ["-Wno-psabi", "-Wno-attributes", "-Wno-deprecated-declarations"]

# Machine code for the architectures that nvcc knows, and PTX of the last one for newer GPUs.
CUDA_ARCHITECTURES = ["70", "75", "80", "86", "89", "90", "100", "110", "120"]
CUDA_FLAGS = [
    "-O3",
    "-std=c++17",
    "--fmad=false",
    "-ftz=true",  # denormals are zero, as on TensorFlow's threads
    "-DNDEBUG",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-ffp-contract=off",
]
