"""Native build on top of pyproject.toml: compiles custom_ops/ against the installed TensorFlow.

The library must be built by the TensorFlow that loads it, so build without isolation:

    pip install --no-build-isolation -e .        or        python setup.py build_ext --inplace

Without TensorFlow, without a compiler (environment variable CXX, default g++) or when compilation
fails, the installation still succeeds: the ops then run in pure TensorFlow, and this says so.
"""

import os
import pathlib
import runpy
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = pathlib.Path(__file__).resolve().parent
# Shared with Bazel, which reads the same file.
LISTS = runpy.run_path(str(ROOT / "custom_ops" / "sources.bzl"))
FLAGS, QUIET = LISTS["FLAGS"], LISTS["QUIET"]


def find(*lists):
    """Files under custom_ops/ that match the patterns of these lists, relative to ROOT."""
    patterns = [pattern for name in lists for pattern in LISTS[name]]
    found = {path for pattern in patterns for path in (ROOT / "custom_ops").glob(pattern)}
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


SOURCES = find("CORE_SOURCES", "OP_SOURCES")
HEADERS = find("CORE_HEADERS", "OP_HEADERS")
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


def compile_library(target, objects):
    """Compiles SOURCES to the shared library `target`, with object files in folder `objects`."""
    cxx = shlex.split(os.environ.get("CXX", "g++"))
    run_compiler([*cxx, "--version"])  # Cheaper to miss than TensorFlow.
    version, compile_flags, link_flags = tensorflow_build()
    # TensorFlow's headers are not ours to mend: keep their warnings out.
    compile_flags = [f"-isystem{f[2:]}" if f.startswith("-I") else f for f in compile_flags]
    define = f'-DREDSYNC_TENSORFLOW_VERSION="{version}"'
    extra = shlex.split(os.environ.get("CXXFLAGS", ""))
    objects.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)

    def compile_one(source):
        output = objects / (source.replace("/", "_") + ".o")
        run_compiler(
            [*cxx, *compile_flags, *FLAGS, *QUIET, *extra, define, "-I.", "-c", source]
            + ["-o", str(output)]
        )
        return str(output)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        outputs = list(pool.map(compile_one, SOURCES))
    partial = target.with_name(target.name + ".partial")
    run_compiler([*cxx, "-shared", "-o", str(partial), *outputs, *link_flags])
    os.replace(partial, target)  # A process that has the old one loaded keeps it.
    return version


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
            version = compile_library(target, pathlib.Path(self.build_temp).resolve() / "native")
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
            say(f"tf_redsync: built the native library for TensorFlow {version}: {target}")


def say(text):
    print(text, file=sys.stderr, flush=True)


setup(
    ext_modules=[Extension("tf_redsync.ops._redsync_ops", SOURCES, depends=HEADERS, optional=True)],
    cmdclass={"build_ext": BuildNative},
)
