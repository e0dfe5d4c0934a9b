"""Native build on top of pyproject.toml: compiles custom_ops/ against the installed TensorFlow.

    pip install .      or      pip install -e .      or      python setup.py build_ext --inplace

The library must be built for the TensorFlow that loads it: install that one first. Without
TensorFlow, without a compiler (environment variable CXX, default g++) or when compilation fails,
the installation still succeeds: the ops then run in pure TensorFlow, and this says so.

Where there is `nvcc` the library gets kernels for GPUs as well. No GPU is needed to build them, nor
to load the library. TF_REDSYNC_CUDA=0 leaves them out; so does a failure of nvcc, and this says so.

custom_ops/sources.bzl lists what is compiled, custom_ops/installed.py finds what it is compiled
with (both serve Bazel, too), and custom_ops/build_library.py does it.
"""

import os
import pathlib
import subprocess
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "custom_ops"))

from build_library import (  # noqa: E402
    PRELOAD_SOURCES,
    SOURCES,
    NativeBuild,
    NativeBuildError,
    build_preload,
    say,
)

LOOPBACK_ONLY = "tf_redsync.cli._loopback_only"


class BuildNative(build_ext):
    """Builds the op library; not a Python extension module, and never a reason to fail."""

    def get_ext_filename(self, fullname):
        return fullname.replace(".", "/") + ".so"

    def get_outputs(self):
        return [path for path in super().get_outputs() if os.path.exists(path)]

    def get_output_mapping(self):
        mapping = super().get_output_mapping()
        return {built: kept for built, kept in mapping.items() if os.path.exists(built)}

    def build_extension(self, ext):
        target = pathlib.Path(self.get_ext_fullpath(ext.name)).resolve()
        if ext.name == LOOPBACK_ONLY:
            return self.build_loopback_only(target)
        try:
            build = NativeBuild(pathlib.Path(self.build_temp).resolve() / "objects")
            build.run(target)
        except (NativeBuildError, subprocess.TimeoutExpired) as error:
            # A library from an earlier build would run other code than this tree's.
            for old in {target, (ROOT / self.get_ext_filename(ext.name))}:
                old.unlink(missing_ok=True)
            say(
                f"tf_redsync: THE NATIVE LIBRARY IS NOT BUILT. {error}\n"
                "tf_redsync: the installation goes on; ops will run in pure TensorFlow, with equal "
                "results but slower. `python -m tf_redsync.doctor` shows what runs."
            )
        else:
            say(
                f"tf_redsync: built the native library for TensorFlow {build.version}: {target}\n"
                f"tf_redsync: GPU kernels: {build.gpu}"
            )

    def build_loopback_only(self, target):
        try:
            build_preload(target)
        except NativeBuildError as error:
            say(
                f"tf_redsync: {target.name} IS NOT BUILT. {error}\ntf_redsync: the installation "
                "goes on; workers' ports will be reachable from outside (docs/security.md)."
            )


extensions = [Extension("tf_redsync.ops._redsync_ops", SOURCES, optional=True)]
if PRELOAD_SOURCES and sys.platform == "linux":
    extensions.append(Extension(LOOPBACK_ONLY, PRELOAD_SOURCES, optional=True))
setup(
    ext_modules=extensions,
    cmdclass={"build_ext": BuildNative},
)
