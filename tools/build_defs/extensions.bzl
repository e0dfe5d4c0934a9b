"""The repositories of configure.bzl for MODULE.bazel. In a file of its own: older Bazels, which read
WORKSPACE, know no `module_extension`.
"""

load(":configure.bzl", "cuda_configure", "tensorflow_configure")

def _installed(_ctx):
    tensorflow_configure(name = "local_config_tf")
    cuda_configure(name = "local_config_cuda")

installed = module_extension(implementation = _installed)
