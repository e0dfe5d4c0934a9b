"""Repository rules for what custom_ops/installed.py finds on this machine: TensorFlow, and nvcc if any.

`@local_config_tf//:config.bzl` has `TENSORFLOW`, a dictionary with version and flags;
`@local_config_tf//:headers` are TensorFlow's headers. `@local_config_cuda//:config.bzl` has `CUDA`, a
dictionary with the command of nvcc, or with "missing" and why there is none.

The Python interpreter is the one named by the environment variable PYTHON_BIN_PATH, else
.venv/bin/python of this project, else `python3`.
"""

_TIMEOUT = 320  # Seconds; installed.py gives up earlier.

_TENSORFLOW_BUILD = """\
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

def _installed(ctx, what):
    """What installed.py answers, decoded."""
    script = ctx.path(Label("//custom_ops:installed.py"))
    run = ctx.execute([_python(ctx), script, what], timeout = _TIMEOUT)
    if run.return_code != 0:
        fail("%s\nTo name another interpreter: PYTHON_BIN_PATH=/path/to/python bazel build //..." %
             run.stderr.strip())
    return json.decode(run.stdout)

def _tensorflow_configure(ctx):
    found = _installed(ctx, "tensorflow")
    ctx.symlink(found["include"], "include")
    ctx.file("WORKSPACE", "")
    ctx.file("BUILD", _TENSORFLOW_BUILD)
    ctx.file("config.bzl", "TENSORFLOW = %r\n" % found)

tensorflow_configure = repository_rule(
    implementation = _tensorflow_configure,
    doc = "Finds the TensorFlow that a Python interpreter imports.",
    environ = ["PYTHON_BIN_PATH", "PATH"],
    local = True,
)

def _cuda_configure(ctx):
    ctx.file("WORKSPACE", "")
    ctx.file("BUILD", "")
    ctx.file("config.bzl", "CUDA = %r\n" % _installed(ctx, "cuda"))

cuda_configure = repository_rule(
    implementation = _cuda_configure,
    doc = "Finds nvcc; there may be none.",
    environ = [
        "CUDA_HOME",
        "PATH",
        "PYTHON_BIN_PATH",
        "REDSYNC_CUDA_ARCHITECTURES",
        "TF_REDSYNC_CUDA",
    ],
    local = True,
)
