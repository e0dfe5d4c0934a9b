"""Compiles and links the native library, in parallel and only what has changed.

setup.py imports this file; tf_redsync/building/ runs it, with what is to be made as JSON on
standard input: "target", "kind" ("cpu", "cuda" or "preload") and, found already, "tensorflow" and
"cuda".

Objects are kept in a cache folder (TF_REDSYNC_CACHE, else tf_redsync/ in XDG_CACHE_HOME, else in
~/.cache) by a hash of all that goes into them: the source and what it includes, flags, compiler,
version of TensorFlow. So one changed file is one compilation, another clone or a new .venv compile
nothing again, and a build that was ended goes on where it was.
"""

import functools
import hashlib
import json
import os
import pathlib
import platform
import re
import shlex
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import installed
from installed import LISTS, NativeBuildError, run_compiler

ROOT = pathlib.Path(__file__).resolve().parents[1]
VERSION = "custom_ops/kernels/version.cc"  # It says what was built.
CORE = "custom_ops/core/"  # which knows no TensorFlow
# What most of the time of compiling against TensorFlow goes to. Precompiling it takes longer than
# including it twice.
TENSORFLOW_HEADERS = ("op.h", "op_kernel.h", "shape_inference.h")
WORTH_PRECOMPILING = 3
KEEP_DAYS = 30
# What is in the folder of objects: those, headers, precompiled headers, and parts of all of them.
KEPT = re.compile(r".+\.[0-9a-f]{32}\.(o|h|h\.gch|(h\.)?\d+\.partial)")


def find(*lists):
    """Files under custom_ops/ that match the patterns of these lists, relative to ROOT."""
    patterns = [pattern for name in lists for pattern in LISTS[name]]
    found = {path for pattern in patterns for path in (ROOT / "custom_ops").glob(pattern)}
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


SOURCES = find("CORE_SOURCES", "OP_SOURCES")
CUDA_SOURCES, GPU_SOURCES = find("CUDA_SOURCES"), find("GPU_OP_SOURCES")
PRELOAD_SOURCES = find("PRELOAD_SOURCES")


@functools.cache
def reads(source):
    """The file and all of this project that it includes, directly or not."""
    included = re.findall(
        r'^#include "((?:custom_ops|tests)/.+?)"', (ROOT / source).read_text(), re.M
    )
    return frozenset({source}).union(*map(reads, included))


class Objects:
    """A folder of objects, each under a hash of what it is made of."""

    def __init__(self, fallback):
        folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        cache = os.environ.get("TF_REDSYNC_CACHE") or os.path.join(folder, "tf_redsync")
        self._folder = pathlib.Path(cache) / "objects"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self._folder).close()
        except OSError:  # A user without a home.
            self._folder = fallback
            self._folder.mkdir(parents=True, exist_ok=True)

    def path(self, source, made_with, *others):
        """Where the object of a source is or will be.

        Args:
            source: Its name is in the object's.
            made_with: What else goes into it, as JSON.
            *others: Further sources of the same object.
        """
        text, files = [json.dumps(made_with)], map(reads, (source, *others))
        text += [(ROOT / file).read_text() for file in sorted(frozenset().union(*files))]
        digest = hashlib.sha256("\0".join(text).encode()).hexdigest()[:32]
        return self._folder / f"{pathlib.Path(source).name}.{digest}.o"

    def header(self, name, lines, made_with):
        """Writes a header to be precompiled with what is in `made_with`; returns its path."""
        text = "".join(lines)
        digest = hashlib.sha256(f"{json.dumps(made_with)}\0{text}".encode()).hexdigest()[:32]
        path = self._folder / f"{name}.{digest}.h"
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(text)
        os.replace(partial, path)
        return path

    def make(self, path, command):
        """Compiles with `command`, to which the output is added, if `path` is not there."""
        if path.exists():
            return os.utime(path)
        partial = path.with_suffix(f".{os.getpid()}.partial")  # Others may be at it, too.
        try:
            run_compiler([*command, "-o", str(partial)], ROOT)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    def clean(self):
        """Removes what no build has asked for in `KEEP_DAYS` days, and nothing of others."""
        for path in self._folder.iterdir():
            ours = KEPT.fullmatch(path.name) and path.is_file() and not path.is_symlink()
            if ours and path.stat().st_mtime < time.time() - KEEP_DAYS * 86400:
                path.unlink(missing_ok=True)


class NativeBuild:
    """One build of the library; the GPU kernels may fail without the rest failing.

    Args:
        folder: For objects, where there is no cache folder.
        found: What `installed.tensorflow` finds, if that is known.
        cuda: What `installed.cuda` finds, if that is known.

    Attributes:
        version: TensorFlow that the library is built for.
        gpu: What GPUs it has kernels for, or "none: " and the reason.
    """

    def __init__(self, folder, found=None, cuda=None):
        self._cxx = shlex.split(os.environ.get("CXX", "g++"))
        compiler = run_compiler([*self._cxx, "--version"])  # Cheaper to miss than TensorFlow.
        found = found or installed.tensorflow()
        self.version, self._link_flags = found["version"], found["link_flags"]
        extra = shlex.split(os.environ.get("CXXFLAGS", ""))
        self._flags = [*found["compile_flags"], *LISTS["FLAGS"], *LISTS["QUIET"], *extra]
        # Without the warnings of TensorFlow's headers, which we cannot fix.
        self._folders = ["-isystem", found["include"], "-I."]
        if not CUDA_SOURCES:
            cuda = {"missing": "there are no sources"}
        self._cuda = cuda or installed.cuda()
        machine = platform.node() if extra else ""  # -march=native is another one's elsewhere
        self._made_with = [compiler, self._cxx, found["version"], found["commit"], machine]
        self._objects = Objects(fallback=folder)

    def _plan(self, source, *defines):
        """The object of a source, and the command that makes it."""
        if source.endswith(".cu"):
            command = [*self._cuda["command"], "-I.", "-c", source]
            made_with = [self._made_with[0], self._cuda["compiler"], *self._cuda["command"]]
        else:
            command = [*self._cxx, *self._flags, *defines, *self._folders, "-c", source]
            made_with = [*self._made_with, *self._flags, *defines]
        return self._objects.path(source, made_with), command

    def _precompile(self, sources):
        """Options that take TensorFlow's headers precompiled, and the file that they are in.

        Precompiling takes as long as several sources, and no object is there before it is done: a
        build that was ended leaves the file to the next one.
        """
        lines = [f'#include "tensorflow/core/framework/{h}"\n' for h in TENSORFLOW_HEADERS]
        made_with = [*self._made_with, *self._flags, *self._folders]
        header = self._objects.header("tensorflow_headers", lines, made_with)
        precompiled = pathlib.Path(f"{header}.gch")
        if sources < WORTH_PRECOMPILING and not precompiled.exists():
            return [], precompiled
        command = [*self._cxx, *self._flags, *self._folders, "-x", "c++-header", str(header)]
        self._objects.make(precompiled, command)
        return ["-include", str(header)], precompiled

    def _compile(self, plans):
        """Makes the objects of `plans`, source by source; returns what failed, by source."""
        failed = {}

        def make(source, *options):
            path, command = plans[source]
            try:
                self._objects.make(path, [*command, *options])
            except NativeBuildError as error:
                failed[source] = str(error)

        todo = [source for source, (path, _) in plans.items() if not path.exists()]
        tensorflow = [source for source in todo if not source.startswith(CORE)]
        with ThreadPoolExecutor(processors()) as pool:
            # The others meanwhile; CUDA sources take longest, once for each architecture.
            others = sorted(set(todo) - set(tensorflow), key=lambda s: (not s.endswith(".cu"), s))
            futures = [pool.submit(make, source) for source in others]
            options, precompiled = self._precompile(len(tensorflow))
            futures += [pool.submit(make, source, *options) for source in tensorflow]
            for future in futures:
                future.result()
        precompiled.unlink(missing_ok=True)  # A hundred megabytes, for a build that is over.
        return failed

    def _link(self, target, sources, plans, cuda_flags):
        defines = [f'-DREDSYNC_TENSORFLOW_VERSION="{self.version}"']
        defines.append(f"-DREDSYNC_GPU_BUILD={json.dumps(self.gpu)}")
        version = self._plan(VERSION, *defines)
        self._objects.make(*version)
        inputs = [str(path) for path, _ in (*(plans[s] for s in sources), version)]
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
        output = ["-shared", "-o", str(partial)]
        run_compiler([*self._cxx, *output, *inputs, *cuda_flags, *self._link_flags], ROOT)
        with open(partial, "rb") as file:  # Else a crash of the machine could leave it empty.
            os.fsync(file.fileno())
        os.replace(partial, target)  # A process that has the old one loaded keeps it.

    def run(self, target):
        """Makes `target`, with GPU kernels if there is a CUDA compiler."""
        sources = [source for source in SOURCES if source != VERSION]
        has_cuda = "missing" not in self._cuda
        if "error" in self._cuda:
            say(f"tf_redsync: THE GPU KERNELS ARE NOT BUILT. {self._cuda['error']}")
        for_gpu = [*CUDA_SOURCES, *GPU_SOURCES] if has_cuda else []
        plans = {source: self._plan(source) for source in (*for_gpu, *sources)}
        failed = self._compile(plans)
        self._objects.clean()
        for source in sources:
            if source in failed:
                raise NativeBuildError(failed[source])
        problem = next(iter(failed.values()), None)
        if has_cuda and problem is None:
            self.gpu = self._cuda["text"]
            try:
                return self._link(target, [*sources, *for_gpu], plans, self._cuda["link_flags"])
            except NativeBuildError as error:
                problem = str(error)
        if problem is not None:
            say(f"tf_redsync: THE GPU KERNELS ARE NOT BUILT. {problem}")
        self.gpu = f"none: {self._cuda.get('missing', 'the build of the CUDA sources failed')}"
        return self._link(target, sources, plans, [])


def build_preload(target):
    """Makes the library that the launcher preloads into workers."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    cxx = shlex.split(os.environ.get("CXX", "g++"))
    sources = [*PRELOAD_SOURCES, "-ldl", "-o", str(partial)]
    run_compiler([*cxx, *LISTS["FLAGS"], "-shared", *sources], ROOT)
    os.replace(partial, target)


def processors():
    """Returns the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


def say(text):
    """Prints a message for users."""
    print(text, file=sys.stderr, flush=True)


def main():
    """Makes what standard input asks for."""
    wanted = json.load(sys.stdin)
    target = pathlib.Path(wanted["target"])
    if wanted["kind"] == "preload":
        return build_preload(target)
    NativeBuild(target.parent / "objects", wanted["tensorflow"], wanted["cuda"]).run(target)


if __name__ == "__main__":
    try:
        main()
    except (NativeBuildError, OSError) as problem:
        sys.exit(str(problem))
