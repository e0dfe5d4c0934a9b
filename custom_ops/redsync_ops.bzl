"""Macros that build the native library out of the sources named in sources.bzl."""

load("@local_config_cuda//:config.bzl", "ARCHITECTURES", "CUDA_LIBRARIES", "NVCC")
load("@local_config_tf//:config.bzl", "TF_COPTS", "TF_LINKOPTS", "TF_VERSION")
load("@rules_cc//cc:defs.bzl", "cc_binary", "cc_library", "cc_test")
load(
    ":sources.bzl",
    "CORE_HEADERS",
    "CORE_SOURCES",
    "CUDA_ARCHITECTURES",
    "CUDA_FLAGS",
    "CUDA_HEADERS",
    "CUDA_SOURCES",
    "FLAGS",
    "GPU_OP_SOURCES",
    "OP_HEADERS",
    "OP_SOURCES",
    "QUIET",
)

def _glob(patterns):
    """Files that match; a pattern may match nothing. tests/unit/test_build.py checks the outcome."""
    return native.glob(patterns, allow_empty = True)

def core_library(name):
    """The algorithms for the CPU, without TensorFlow."""
    cc_library(
        name = name,
        srcs = _glob(CORE_SOURCES),
        hdrs = _glob(CORE_HEADERS),
        copts = FLAGS + QUIET,
        # Its symbols are hidden: it cannot be a shared library of its own.
        linkstatic = True,
        visibility = ["//visibility:public"],
    )

def core_test(name, srcs):
    """One C++ test program of the core: its source, and the headers that tests share."""
    cc_test(
        name = name,
        size = "small",
        srcs = srcs,
        copts = FLAGS + QUIET,
        linkopts = ["-pthread"],
        linkstatic = True,
        deps = ["//custom_ops:core"],
    )

def _architectures():
    return ARCHITECTURES or CUDA_ARCHITECTURES

def _cuda_objects():
    """Names of the object files of the CUDA sources; empty where there is no nvcc."""
    if not NVCC:
        return []
    architectures = _architectures()
    code = ["-gencode=arch=compute_%s,code=sm_%s" % (a, a) for a in architectures]
    code.append("-gencode=arch=compute_{0},code=compute_{0}".format(architectures[-1]))
    headers = _glob(CUDA_HEADERS + CORE_HEADERS)
    objects = []
    for source in _glob(CUDA_SOURCES):
        object = source.replace("/", "_") + ".pic.o"
        native.genrule(
            name = source.replace("/", "_"),
            srcs = [source] + headers,
            outs = [object],
            cmd = " ".join([NVCC] + CUDA_FLAGS + code + ["-I. -c $(location %s) -o $@" % source]),
            message = "nvcc",
        )
        objects.append(object)
    return objects

def op_library(name, core):
    """The shared library that TensorFlow loads."""
    objects = _cuda_objects()
    cuda = ["-L" + CUDA_LIBRARIES, "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    kernels = OP_SOURCES + (GPU_OP_SOURCES if objects else [])
    gpu = "none: there is no nvcc"
    if objects:
        gpu = "CUDA: %s and PTX for newer ones" % ", ".join(["sm_" + a for a in _architectures()])
    cc_binary(
        name = name,
        srcs = _glob(kernels + OP_HEADERS) + objects,
        copts = TF_COPTS + FLAGS + QUIET,
        # TensorFlow's library has some of the CUDA run time's symbols, too: ours come first.
        linkopts = (cuda if objects else []) + TF_LINKOPTS,
        linkshared = True,
        # Each one word of a shell.
        local_defines = [
            "REDSYNC_TENSORFLOW_VERSION='\"%s\"'" % TF_VERSION,
            "REDSYNC_GPU_BUILD='\"%s\"'" % gpu,
        ],
        visibility = ["//visibility:public"],
        deps = [core, "@local_config_tf//:headers"],
    )
