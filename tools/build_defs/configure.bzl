"""Repository rules that find what is installed on this machine: TensorFlow, and nvcc if any.

`@local_config_tf//:config.bzl` has the version and the flags of the TensorFlow that the Python
interpreter imports; `@local_config_tf//:headers` are its headers. The interpreter is the one named
by the environment variable PYTHON_BIN_PATH, else .venv/bin/python of this project, else `python3`.

`@local_config_cuda//:config.bzl` has the path of nvcc: in the folder named by the environment
variable CUDA_HOME, else in PATH, else in /usr/local/cuda; empty where there is none, or with
TF_REDSYNC_CUDA=0. The environment variable REDSYNC_CUDA_ARCHITECTURES, such as "80 90", replaces
the list of custom_ops/sources.bzl.
"""

_TIMEOUT = 300  # Seconds; importing TensorFlow takes a few, on a cold disk many.

_PROGRAM = """
import tensorflow as tf
print("\\n@@")
print(tf.__version__)
print(tf.sysconfig.get_include())
print(*tf.sysconfig.get_compile_flags(), sep="\\t")
print(*tf.sysconfig.get_link_flags(), sep="\\t")
"""

_TENSORFLOW_BUILD = """\
load("@rules_cc//cc:defs.bzl", "cc_library")

package(default_visibility = ["//visibility:public"])

# As system headers: their warnings are not ours to mend.
cc_library(
    name = "headers",
    hdrs = glob(
        ["include/**"],
        exclude = ["include/**/BUILD*", "include/external/**"],
    ),
    includes = ["include"],
)
"""

def _python(ctx):
    """The interpreter whose TensorFlow is to be used."""
    named = ctx.os.environ.get("PYTHON_BIN_PATH", "")
    if named:
        path = ctx.path(named) if named.startswith("/") else ctx.which(named)
        if path == None or not path.exists:
            fail("PYTHON_BIN_PATH must name a Python interpreter. Received: %s." % named)
        return path
    path = ctx.path(Label("//:setup.py")).dirname.get_child(".venv").get_child("bin")
    path = path.get_child("python")
    path = path if path.exists else ctx.which("python3")
    if path == None:
        fail("There is no python3. Name an interpreter with TensorFlow: PYTHON_BIN_PATH=...")
    return path

def _tensorflow_configure(ctx):
    python = _python(ctx)
    run = ctx.execute(
        [python, "-c", _PROGRAM],
        timeout = _TIMEOUT,
        environment = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"},
    )
    if run.return_code != 0:
        fail(("TensorFlow cannot be imported by %s. Install it there, or name another " +
              "interpreter: PYTHON_BIN_PATH=/path/to/python bazel build //...\n%s") %
             (python, "\n".join(run.stderr.strip().split("\n")[-5:])))
    text = run.stdout.split("\n@@\n")[-1].split("\n")
    version, include, compile_flags, link_flags = text[:4]
    ctx.symlink(include, "include")
    ctx.file("WORKSPACE", "")
    ctx.file("BUILD", _TENSORFLOW_BUILD)
    ctx.file("config.bzl", "\n".join([
        '"""The installed TensorFlow, found by tools/build_defs/configure.bzl."""',
        "TF_PYTHON = %r" % str(python),
        "TF_VERSION = %r" % version,
        "TF_COPTS = %r" % [f for f in compile_flags.split("\t") if not f.startswith("-I")],
        "TF_LINKOPTS = %r" % link_flags.split("\t"),
        "",
    ]))

tensorflow_configure = repository_rule(
    implementation = _tensorflow_configure,
    doc = "Finds the TensorFlow that a Python interpreter imports.",
    environ = ["PYTHON_BIN_PATH", "PATH"],
    local = True,
)

def _nvcc(ctx):
    """Path of nvcc, or None."""
    if ctx.os.environ.get("TF_REDSYNC_CUDA", "") == "0":
        return None
    home = ctx.os.environ.get("CUDA_HOME", "")
    if home:
        path = ctx.path(home).get_child("bin").get_child("nvcc")
        if not path.exists:
            fail("CUDA_HOME must be the folder of a CUDA toolkit. Received: %s." % home)
        return path
    path = ctx.which("nvcc")
    if path != None:
        return path
    path = ctx.path("/usr/local/cuda/bin/nvcc")
    return path if path.exists else None

def _cuda_configure(ctx):
    nvcc = _nvcc(ctx)
    architectures = ctx.os.environ.get("REDSYNC_CUDA_ARCHITECTURES", "")
    libraries = ""
    if nvcc != None:
        # nvcc may be a script or a link: it says itself where its toolkit is.
        run = ctx.execute([nvcc, "--dryrun", "-c", "-x", "cu", "-o", "none.o", "/dev/null"])
        for line in run.stderr.split("\n"):
            if line.startswith("#$ TOP="):
                libraries = line[len("#$ TOP="):] + "/lib64"
    ctx.file("WORKSPACE", "")
    ctx.file("BUILD", "")
    ctx.file("config.bzl", "\n".join([
        '"""The installed CUDA toolkit, found by tools/build_defs/configure.bzl."""',
        "NVCC = %r" % ("" if nvcc == None else str(nvcc)),
        "CUDA_LIBRARIES = %r" % libraries,
        "ARCHITECTURES = %r" % [a for a in architectures.split(" ") if a],
        "",
    ]))

cuda_configure = repository_rule(
    implementation = _cuda_configure,
    doc = "Finds nvcc; there may be none.",
    environ = ["CUDA_HOME", "PATH", "REDSYNC_CUDA_ARCHITECTURES", "TF_REDSYNC_CUDA"],
    local = True,
)
