"""What pyproject.toml cannot say: the package carries its C++ sources; how to build them in place.

    pip install .      or      pip install -e .

compile nothing, need no TensorFlow, and make the same wheel everywhere: the native library is built
for the TensorFlow at hand when it is first used, or by `python -m tf_redsync build`
(tf_redsync/building/). In a source tree

    python setup.py build_ext --inplace

builds it beside the package, which prefers it there. Without TensorFlow, without a compiler
(environment variable CXX, default g++) or when compilation fails, this says so and removes the old
library; the ops then run in pure TensorFlow.

Where there is `nvcc` it gets kernels for GPUs as well. No GPU is needed to build them, nor to load
the library. TF_REDSYNC_CUDA=0 leaves them out; so does a failure of nvcc, and this says so.

custom_ops/sources.bzl lists what is compiled, custom_ops/installed.py finds what it is compiled
with (both serve Bazel, too), and custom_ops/build_library.py does it.
"""

import pathlib
import shutil
import subprocess
import sys

from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "custom_ops"))

from build_library import (  # noqa: E402
    PRELOAD_SOURCES,
    NativeBuild,
    NativeBuildError,
    build_preload,
    say,
)

OP_LIBRARY = ROOT / "tf_redsync" / "ops" / "_redsync_ops.so"
LOOPBACK_ONLY = ROOT / "tf_redsync" / "cli" / "_loopback_only.so"
CARRIED = {".bzl", ".cc", ".cu", ".cuh", ".h", ".py"}


class CarrySources(build_py):
    """Puts custom_ops/ into the package, for tf_redsync/building/ to compile."""

    def run(self):
        package = pathlib.Path(self.build_lib) / "tf_redsync"
        if not self.editable_mode:
            shutil.rmtree(package, ignore_errors=True)  # what another state of the tree left there
        super().run()
        if not self.editable_mode:
            for source, target in self._carried():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)

    def _carried(self):
        folder = pathlib.Path(self.build_lib) / "tf_redsync" / "_native"
        for source in sorted((ROOT / "custom_ops").rglob("*")):
            if source.suffix in CARRIED:
                yield source, folder / source.relative_to(ROOT)

    def get_outputs(self, include_bytecode=True):
        carried = [] if self.editable_mode else [str(target) for _, target in self._carried()]
        return super().get_outputs(include_bytecode) + carried


class BuildInPlace(build_ext):
    """Builds the libraries in a source tree; they are no Python extension modules."""

    def run(self):
        if not self.inplace:
            sys.exit("Use `python setup.py build_ext --inplace`; wheels hold no native library.")
        self.build_op_library()
        if PRELOAD_SOURCES:
            self.build_loopback_only()

    def build_op_library(self):
        try:
            build = NativeBuild(ROOT / "build" / "objects")
            build.run(OP_LIBRARY)
        except (NativeBuildError, subprocess.TimeoutExpired) as error:
            # A library from an earlier build would run other code than this tree's.
            OP_LIBRARY.unlink(missing_ok=True)
            say(
                f"tf_redsync: THE NATIVE LIBRARY IS NOT BUILT. {error}\n"
                "tf_redsync: ops will run in pure TensorFlow, with equal results but slower. "
                "`python -m tf_redsync doctor` shows what runs."
            )
        else:
            say(
                f"tf_redsync: built the native library for TensorFlow {build.version}: "
                f"{OP_LIBRARY}\ntf_redsync: GPU kernels: {build.gpu}"
            )

    def build_loopback_only(self):
        try:
            build_preload(LOOPBACK_ONLY)
        except NativeBuildError as error:
            say(
                f"tf_redsync: {LOOPBACK_ONLY.name} IS NOT BUILT. {error}\ntf_redsync: workers' "
                "ports will be reachable from outside (docs/security.md)."
            )


setup(cmdclass={"build_py": CarrySources, "build_ext": BuildInPlace})
