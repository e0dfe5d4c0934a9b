"""Macros that build the native library from the sources in sources.bzl."""

load("@local_config_cuda//:config.bzl", "CUDA")
load("@local_config_tf//:config.bzl", "TENSORFLOW")
load(
    ":sources.bzl",
    "CORE_HEADERS",
    "CORE_SOURCES",
    "CUDA_HEADERS",
    "CUDA_SOURCES",
    "FLAGS",
    "GPU_OP_SOURCES",
    "OP_HEADERS",
    "OP_SOURCES",
    "PRELOAD_SOURCES",
    "QUIET",
    "TEST_FLAGS",
)

def _glob(patterns):
    """Returns matching files; a pattern may match none. tests/unit/test_build.py checks them."""
    return native.glob(patterns, allow_empty = True)

def core_library(name):
    """Defines the library of the CPU algorithms, without TensorFlow."""
    native.cc_library(
        name = name,
        srcs = _glob(CORE_SOURCES),
        hdrs = _glob(CORE_HEADERS),
        copts = FLAGS + QUIET,
        # Its symbols are hidden, so it cannot be a shared library.
        linkstatic = True,
        visibility = ["//visibility:public"],
    )

def core_test(name, srcs):
    """Defines a C++ test program of the core from its source and shared headers."""
    native.cc_test(
        name = name,
        size = "small",
        srcs = srcs,
        copts = FLAGS + QUIET + TEST_FLAGS,
        linkopts = ["-pthread"],
        linkstatic = True,
        deps = ["//custom_ops:core"],
    )

def _cuda_objects():
    """Returns the names of the object files of the CUDA sources; empty without nvcc."""
    if "missing" in CUDA:
        return []
    headers = _glob(CUDA_HEADERS + CORE_HEADERS)
    objects = []
    for source in _glob(CUDA_SOURCES):
        object = source.replace("/", "_") + ".pic.o"
        native.genrule(
            name = source.replace("/", "_"),
            srcs = [source] + headers,
            outs = [object],
            cmd = " ".join(CUDA["command"] + ["-I. -c $(location %s) -o $@" % source]),
            message = "nvcc",
        )
        objects.append(object)
    return objects

def _together(name, pattern):
    """Defines one source that includes all matches, since TensorFlow's headers compile slowly."""
    sources = _glob([pattern])
    native.genrule(
        name = name,
        srcs = sources,
        outs = [name + ".cc"],
        cmd = "printf '#include \"%s\"\\n' $(SRCS) > $@",
    )
    native.cc_library(
        name = name + "_parts",
        textual_hdrs = sources,
    )

def op_library(name, core):
    """Defines the shared library that TensorFlow loads."""
    objects = _cuda_objects()
    patterns = OP_SOURCES + (GPU_OP_SOURCES if objects else [])
    units = []
    for pattern in patterns:
        unit = "all_of_" + "_".join([p for p in pattern.split("/") if "*" not in p])
        _together(unit, pattern)
        units.append(unit)
    gpu = CUDA["text"] if objects else "none: " + CUDA.get("missing", "there are no sources")
    native.cc_binary(
        name = name,
        srcs = [unit + ".cc" for unit in units] + _glob(OP_HEADERS) + objects,
        copts = TENSORFLOW["compile_flags"] + FLAGS + QUIET,
        linkopts = (CUDA["link_flags"] if objects else []) + TENSORFLOW["link_flags"],
        linkshared = True,
        # Quoted, so that each is one word for the shell.
        local_defines = [
            "REDSYNC_TENSORFLOW_VERSION='\"%s\"'" % TENSORFLOW["version"],
            "REDSYNC_GPU_BUILD='\"%s\"'" % gpu,
        ],
        visibility = ["//visibility:public"],
        deps = [core, "@local_config_tf//:headers"] + [unit + "_parts" for unit in units],
    )

def preload_library(name):
    """Defines the library that the launcher preloads into workers."""
    native.cc_binary(
        name = name,
        srcs = _glob(PRELOAD_SOURCES),
        copts = FLAGS,
        linkopts = ["-ldl"],
        linkshared = True,
        visibility = ["//visibility:public"],
    )
