"""Native build on top of pyproject.toml: compiles custom_ops/ against the installed TensorFlow.

The library must be built by the TensorFlow that loads it, so build without isolation:

    pip install --no-build-isolation -e .        or        python setup.py build_ext --inplace

Without TensorFlow, without a compiler (environment variable CXX, default g++) or when compilation
fails, the installation still succeeds: the ops then run in pure TensorFlow, and this says so.

Where there is `nvcc` (in CUDA_HOME/bin or on PATH) the library gets kernels for GPUs as well. No
GPU is needed to build them, nor to load the library. TF_REDSYNC_CUDA=0 leaves them out; so does a
failure of nvcc, and this says so.
"""

import json
import os
import pathlib
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = pathlib.Path(__file__).resolve().parent

# Shared with Bazel, which reads the same file.
LISTS = runpy.run_path(str(ROOT / "custom_ops" / "sources.bzl"))
FLAGS, QUIET, CUDA_FLAGS = LISTS["FLAGS"], LISTS["QUIET"], LISTS["CUDA_FLAGS"]
ARCHITECTURES = LISTS["CUDA_ARCHITECTURES"]


def find(*lists):
    """Files under custom_ops/ that match the patterns of these lists, relative to ROOT."""
    patterns = [pattern for name in lists for pattern in LISTS[name]]
    found = {path for pattern in patterns for path in (ROOT / "custom_ops").glob(pattern)}
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


SOURCES = find("CORE_SOURCES", "OP_SOURCES")
CUDA_SOURCES, GPU_SOURCES = find("CUDA_SOURCES"), find("GPU_OP_SOURCES")
HEADERS = find("CORE_HEADERS", "OP_HEADERS", "CUDA_HEADERS")
VERSION = "custom_ops/kernels/version.cc"  # Compiled last: it says what was built.
# Compiled once for all of custom_ops/ops and custom_ops/kernels, most of whose time they take.
TENSORFLOW_HEADERS = ("op.h", "op_kernel.h", "shape_inference.h")
LAST_LINES = 20


class NativeBuildError(Exception):
    """The native library cannot be built; the text says why."""


def tensorflow_build():
    """Version, compile flags and link flags of the installed TensorFlow."""
    # In a process of its own: importing TensorFlow here would slow down and disturb every command.
    program = (
        "import tensorflow as tf; print('\\n' + tf.__version__); "
        "print(*tf.sysconfig.get_compile_flags(), sep='\\t'); "
        "print(*tf.sysconfig.get_link_flags(), sep='\\t')"
    )
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    run = subprocess.run(
        [sys.executable, "-c", program], env=env, cwd=tempfile.gettempdir(), capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    if run.returncode != 0:
        reason = (run.stderr.strip().splitlines() or ["no output"])[-1]
        raise NativeBuildError(
            f"TensorFlow cannot be imported by {sys.executable} ({reason}). Install TensorFlow "
            "first, then this project with `pip install --no-build-isolation`."
        )
    version, compile_flags, link_flags = run.stdout.rstrip("\n").splitlines()[-3:]
    return version, compile_flags.split("\t"), link_flags.split("\t")


def run_compiler(command):
    try:
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError as error:
        raise NativeBuildError(
            f"There is no C++ compiler {command[0]!r} ({error.strerror}). Install g++ or set CXX."
        ) from error
    if run.returncode != 0:
        lines = "\n".join((run.stderr or run.stdout).strip().splitlines()[-LAST_LINES:])
        raise NativeBuildError(f"The compiler failed: {shlex.join(command)}\n{lines}")
    return run.stdout + run.stderr


def find_cuda():
    """A `CudaBuild` and "", or None and the reason why there is none."""
    if os.environ.get("TF_REDSYNC_CUDA") == "0":
        return None, "left out by TF_REDSYNC_CUDA=0"
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=os.path.join(home, "bin")) if home else shutil.which("nvcc")
    if nvcc is None or not CUDA_SOURCES:
        return None, f"there is no nvcc in {'CUDA_HOME/bin' if home else 'PATH'}"
    try:
        return CudaBuild(nvcc), ""
    except NativeBuildError as error:
        say(f"tf_redsync: THE GPU KERNELS ARE NOT BUILT. {error}")
        return None, f"{nvcc} does not run"


class CudaBuild:
    """What compiles the CUDA sources: commands, link flags, and what to say of it."""

    def __init__(self, nvcc):
        version = re.search(r"release ([\d.]+)", run_compiler([nvcc, "--version"]))
        number = version.group(1) if version else "?"
        names = ", ".join(f"sm_{a}" for a in ARCHITECTURES)
        self.text = f"CUDA {number}: {names} and PTX for newer ones"
        codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHITECTURES]
        last = ARCHITECTURES[-1]
        codes.append(f"-gencode=arch=compute_{last},code=compute_{last}")
        self._command = [nvcc, *CUDA_FLAGS, *codes, "-I."]
        # nvcc may be a script in another place than the toolkit; it knows where its libraries are.
        plan = run_compiler([nvcc, "--dryrun", "-c", CUDA_SOURCES[0], "-o", os.devnull])
        line = next((t for t in plan.splitlines() if "LIBRARIES=" in t), "")
        folders = [f for f in shlex.split(line.partition("=")[2]) if f.startswith("-L")]
        # Before TensorFlow, which exports the names of a CUDA run-time library of its own.
        self.link_flags = [*folders, "-lcudart_static", "-ldl", "-lrt", "-lpthread"]

    def command(self, source, output):
        return [*self._command, "-c", source, "-o", str(output)]


class NativeBuild:
    """Compiles and links the library; the GPU kernels may fail without the rest failing.

    Attributes:
        version: TensorFlow that the library is built for.
        gpu: What GPUs it has kernels for, or "none: " and the reason.
    """

    def __init__(self, objects):
        cxx = shlex.split(os.environ.get("CXX", "g++"))
        run_compiler([*cxx, "--version"])  # Cheaper to miss than TensorFlow.
        self.version, compile_flags, self._link_flags = tensorflow_build()
        # TensorFlow's headers are not ours to mend: keep their warnings out.
        compile_flags = [f"-isystem{f[2:]}" if f.startswith("-I") else f for f in compile_flags]
        extra = shlex.split(os.environ.get("CXXFLAGS", ""))
        self._cxx = cxx
        self._flags = [*compile_flags, *FLAGS, *QUIET, *extra, "-I."]
        self._objects = objects
        objects.mkdir(parents=True, exist_ok=True)

    def _object(self, source):
        return str(self._objects / (source.replace("/", "_") + ".o"))

    def _precompile(self):
        """Precompiles TensorFlow's headers; without, a compiler would read them as they are."""
        self._header = self._objects / "tensorflow_headers.h"
        lines = [f'#include "tensorflow/core/framework/{h}"\n' for h in TENSORFLOW_HEADERS]
        self._header.write_text("".join(lines))
        output = ["-x", "c++-header", str(self._header), "-o", f"{self._header}.gch"]
        run_compiler([*self._cxx, *self._flags, *output])

    def _compile(self, source, *defines):
        output = ["-c", source, "-o", self._object(source)]
        if not source.startswith("custom_ops/core/"):  # which knows no TensorFlow
            output = ["-include", str(self._header), *output]
        run_compiler([*self._cxx, *self._flags, *defines, *output])

    def _compile_for_gpu(self, cuda, source):
        """Compiles one of the GPU's sources; returns why not, or None."""
        try:
            if source.endswith(".cu"):
                run_compiler(cuda.command(source, self._object(source)))
            else:
                self._compile(source)
        except NativeBuildError as error:
            return str(error)
        return None

    def _compile_version(self):
        tensorflow = f'-DREDSYNC_TENSORFLOW_VERSION="{self.version}"'
        self._compile(VERSION, tensorflow, f"-DREDSYNC_GPU_BUILD={json.dumps(self.gpu)}")

    def _link(self, target, sources, cuda_flags):
        partial = target.with_name(target.name + ".partial")
        inputs = [self._object(source) for source in sources]
        output = ["-shared", "-o", str(partial)]
        run_compiler([*self._cxx, *output, *inputs, *cuda_flags, *self._link_flags])
        os.replace(partial, target)  # A process that has the old one loaded keeps it.

    def run(self, target, cuda, no_cuda):
        """Makes `target`, with GPU kernels if there is a `CudaBuild`; `no_cuda` says why not."""
        self.gpu = f"none: {no_cuda}" if cuda is None else cuda.text
        for_gpu = [] if cuda is None else [*CUDA_SOURCES, *GPU_SOURCES]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            problems = [pool.submit(self._compile_for_gpu, cuda, s) for s in for_gpu if ".cu" in s]
            self._precompile()
            rest = [s for s in for_gpu if ".cu" not in s]
            problems += [pool.submit(self._compile_for_gpu, cuda, source) for source in rest]
            list(pool.map(self._compile, [s for s in SOURCES if s != VERSION]))
            problem = next((p.result() for p in problems if p.result()), None)
        target.parent.mkdir(parents=True, exist_ok=True)
        if cuda is not None and problem is None:
            try:
                self._compile_version()
                return self._link(target, [*SOURCES, *for_gpu], cuda.link_flags)
            except NativeBuildError as error:
                problem = str(error)
        if problem is not None:
            say(f"tf_redsync: THE GPU KERNELS ARE NOT BUILT. {problem}")
            self.gpu = "none: the build of the CUDA sources failed"
        self._compile_version()
        return self._link(target, SOURCES, [])

    def clean(self):
        """Removes the precompiled headers, hundreds of megabytes."""
        (self._objects / "tensorflow_headers.h.gch").unlink(missing_ok=True)


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
        try:
            build = NativeBuild(pathlib.Path(self.build_temp).resolve() / "native")
            try:
                build.run(target, *find_cuda())
            finally:
                build.clean()
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


def say(text):
    print(text, file=sys.stderr, flush=True)


setup(
    ext_modules=[Extension("tf_redsync.ops._redsync_ops", SOURCES, depends=HEADERS, optional=True)],
    cmdclass={"build_ext": BuildNative},
)
