"""Compiles and links the native library, in parallel and incrementally.

setup.py imports this file. tf_redsync/building/ runs it with a JSON request on standard input:
"target", "kind" ("cpu", "cuda" or "preload"), and the results of installed.py as "tensorflow" and
"cuda". The kind "core" compiles only the objects that need no TensorFlow, for example while
TensorFlow is being installed.

Objects are kept in a cache folder (TF_REDSYNC_CACHE, else tf_redsync/ in XDG_CACHE_HOME, else in
~/.cache) by a hash of all their inputs: the source and its includes, flags, compiler, and version
of TensorFlow. So another clone or a new .venv reuses them, and an interrupted build resumes. All
ops are compiled as one source, and so are all kernels, because TensorFlow's headers take longer
than the sources that include them.
"""

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import platform
import re
import secrets
import shlex
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))  # for PYTHONSAFEPATH

import installed  # noqa: E402
from installed import LISTS, NativeBuildError, run_compiler  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[1]
VERSION = "custom_ops/kernels/version.cc"  # describes the build
HOST_FLAG = r"-m(arch|cpu|tune)=native"  # depends on the machine
KEEP_DAYS = 30
# Files in the folder of objects: objects, sources that include others, and incomplete files.
KEPT = re.compile(r".+\.[0-9a-f]{32}\.(o|cc|[0-9a-f]+\.partial)")


def find_pattern(pattern):
    """Return the files under custom_ops/ that match `pattern`, relative to ROOT."""
    paths = (ROOT / "custom_ops").glob(pattern)
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


def find(*lists):
    """Return the files that match the patterns of these lists in sources.bzl."""
    return sorted({file for name in lists for p in LISTS[name] for file in find_pattern(p)})


SOURCES = find("CORE_SOURCES", "OP_SOURCES")
CORE_SOURCES = find("CORE_SOURCES")  # do not include TensorFlow
CUDA_SOURCES = find("CUDA_SOURCES")
PRELOAD_SOURCES = find("PRELOAD_SOURCES")


@functools.cache
def reads(source):
    """Return a file and all files of this project that it includes, directly or indirectly."""
    # A source names the file that `versions_inl.h` compiles in a macro.
    words = r'^#(?:include|define REDSYNC_SOURCE) "((?:custom_ops|tests)/.+?)"'
    included = re.findall(words, (ROOT / source).read_text(), re.M)
    return frozenset({source}).union(*map(reads, included))


def partial_name(path):
    """Return a new name for an incomplete file, which other processes may write at the same time.

    It is random: containers that share a folder may have equal process IDs.
    """
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")


def publish(partial, path):
    """Give a complete file its name; without `fsync` a crash of the machine may leave it empty."""
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, path)  # processes that have loaded the old file keep it


class Objects:
    """A folder of objects, each named by a hash of its inputs."""

    def __init__(self, fallback):
        folder = os.environ.get("XDG_CACHE_HOME", "")
        if not os.path.isabs(folder):  # the XDG specification ignores relative paths
            folder = os.path.expanduser("~/.cache")
        cache = os.environ.get("TF_REDSYNC_CACHE") or os.path.join(folder, "tf_redsync")
        self._folder = pathlib.Path(cache) / "objects"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self._folder).close()
        except OSError:  # for example a user without a home directory
            self._folder = fallback
            self._folder.mkdir(parents=True, exist_ok=True)

    def path(self, source, made_with, *others):
        """Return the path of a source's object, which may not exist yet.

        Args:
            source: The source, whose name is part of the object's name.
            made_with: Other inputs of the object, JSON-serializable.
            *others: Further sources of the same object.
        """
        text, files = [json.dumps(made_with)], map(reads, (source, *others))
        text += [(ROOT / file).read_text() for file in sorted(frozenset().union(*files))]
        digest = hashlib.sha256("\0".join(text).encode()).hexdigest()[:32]
        return self._folder / f"{pathlib.Path(source).name}.{digest}.o"

    def including(self, name, sources):
        """Write a source that includes others; return its path."""
        text = "".join(f'#include "{source}"\n' for source in sources)
        digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        path = self._folder / f"{name}.{digest}.cc"
        partial = partial_name(path.with_suffix(""))
        partial.write_text(text)
        with contextlib.suppress(PermissionError):  # another user's file, which has this text
            os.replace(partial, path)
        partial.unlink(missing_ok=True)
        return str(path)

    def make(self, path, command):
        """Compile with `command`, extended by the output file, unless `path` is complete."""
        if path.exists() and path.stat().st_size:
            with contextlib.suppress(PermissionError):  # another user's file
                os.utime(path)
            return
        partial = partial_name(path.with_suffix(""))
        try:
            run_compiler([*command, "-o", str(partial)], ROOT)
            publish(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    def clean(self):
        """Remove files that no build has used for `KEEP_DAYS` days; keep foreign files."""
        for path in self._folder.iterdir():
            ours = KEPT.fullmatch(path.name) and path.is_file() and not path.is_symlink()
            ours = ours and os.access(path, os.W_OK)  # otherwise `make` keeps its time stamp
            # Another build has removed or renamed it, or the folder protects other users' files.
            with contextlib.suppress(FileNotFoundError, PermissionError):
                if ours and path.stat().st_mtime < time.time() - KEEP_DAYS * 86400:
                    path.unlink()


class CoreBuild:
    """Builds the objects that need no TensorFlow.

    Args:
        folder: For objects, where there is no cache folder.
    """

    def __init__(self, folder):
        self._cxx = shlex.split(os.environ.get("CXX") or "g++")
        compiler = [run_compiler([*self._cxx, "--version"])]
        compiler += [platform.machine(), *platform.libc_ver()]  # which the version may omit
        extra = os.environ.get("CXXFLAGS", "")
        self._flags = [*LISTS["FLAGS"], *LISTS["QUIET"], *shlex.split(extra)]
        machine = platform.node() if re.search(HOST_FLAG, " ".join([*self._cxx, extra])) else ""
        self._made_with = [compiler, self._cxx, machine]
        self._objects = Objects(fallback=folder)

    def _core_plans(self):
        """Return object and compile command by source, the largest source first."""
        made_with = [*self._made_with, *self._flags]
        command = [*self._cxx, *self._flags, "-I.", "-c"]
        size = {s: sum((ROOT / file).stat().st_size for file in reads(s)) for s in CORE_SOURCES}
        return {
            source: (self._objects.path(source, made_with), [*command, source])
            for source in sorted(CORE_SOURCES, key=lambda s: (-size[s], s))
        }

    def _compile(self, plans):
        """Build the objects of `plans`; return the errors by source."""
        failed = {}

        def make(source):
            try:
                self._objects.make(*plans[source])
            except NativeBuildError as error:
                failed[source] = str(error)

        with ThreadPoolExecutor(processors()) as pool:
            list(pool.map(make, plans))
        return failed

    def run(self):
        """Build the objects.

        Raises:
            NativeBuildError: A source cannot be compiled.
        """
        for problem in self._compile(self._core_plans()).values():
            raise NativeBuildError(problem)


class NativeBuild(CoreBuild):
    """One build of the library; without GPU kernels if those fail.

    Args:
        folder: For objects, where there is no cache folder.
        tensorflow: Result of `installed.tensorflow`; `None` to call it.
        cuda: Result of `installed.cuda`; `None` to call it.

    Attributes:
        version: TensorFlow version that the library is built for.
        gpu: GPUs of the kernels, as text, or "none: " and the reason.
    """

    def __init__(self, folder, tensorflow=None, cuda=None):
        super().__init__(folder)  # first, because it fails faster than the search for TensorFlow
        tensorflow = tensorflow or installed.tensorflow()
        self.version, self._link_flags = tensorflow["version"], tensorflow["link_flags"]
        self._flags_of_ops = [*tensorflow["compile_flags"], *self._flags]
        # -isystem suppresses warnings in TensorFlow's headers.
        self._folders = ["-isystem", tensorflow["include"], "-I."]
        self._made_with_tensorflow = [*self._made_with, tensorflow["version"], tensorflow["commit"]]
        if not CUDA_SOURCES:
            cuda = {"missing": "there are no sources"}
        self._cuda = cuda or installed.cuda()

    def _plan(self, source, *defines):
        """Return object and compile command of a source that includes TensorFlow."""
        flags = [*self._flags_of_ops, *defines]
        path = self._objects.path(source, [*self._made_with_tensorflow, *flags])
        # CXXFLAGS may have system folders with other versions of the headers that TensorFlow has.
        return path, [*self._cxx, *self._folders, *flags, "-c", source]

    def _plans(self, name):
        """Return plans by unit: one source per pattern of a list, which includes all matches."""
        plans = {}
        for pattern in LISTS[name]:
            sources = [s for s in find_pattern(pattern) if s != VERSION]
            unit = "_".join(part for part in pattern.split("/") if "*" not in part)
            if sources:
                plans[unit] = self._plan(self._objects.including(unit, sources))
        return plans

    def _cuda_plan(self, source):
        command = [*self._cuda["command"], "-I.", "-c", source]
        made_with = [self._made_with[0], self._cuda["compiler"], *self._cuda["command"]]
        return self._objects.path(source, made_with), command

    def _link(self, target, plans, cuda_flags):
        defines = [f'-DREDSYNC_TENSORFLOW_VERSION="{self.version}"']
        defines.append(f"-DREDSYNC_GPU_BUILD={json.dumps(self.gpu)}")
        version = self._plan(VERSION, *defines)
        self._objects.make(*version)
        inputs = [str(path) for path, _ in (*plans.values(), version)]
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = partial_name(target)
        output = ["-shared", "-o", str(partial)]
        run_compiler([*self._cxx, *output, *inputs, *cuda_flags, *self._link_flags], ROOT)
        publish(partial, target)

    def run(self, target):
        """Build `target`, with GPU kernels if there is a CUDA compiler.

        Raises:
            NativeBuildError: The CPU part cannot be built.
        """
        has_cuda = "missing" not in self._cuda
        if "error" in self._cuda:
            say(f"tf_redsync: THE GPU KERNELS ARE NOT BUILT. {self._cuda['error']}")
        plans = {**self._plans("OP_SOURCES"), **self._core_plans()}
        for_gpu = {}
        if has_cuda:  # first, because they take longest: once per architecture
            for_gpu = {source: self._cuda_plan(source) for source in CUDA_SOURCES}
            for_gpu |= self._plans("GPU_OP_SOURCES")
        failed = self._compile({**for_gpu, **plans})
        self._objects.clean()
        for source in plans:
            if source in failed:
                raise NativeBuildError(failed[source])
        problem = next(iter(failed.values()), None)
        if has_cuda and problem is None:
            self.gpu = self._cuda["text"]
            try:
                return self._link(target, {**plans, **for_gpu}, self._cuda["link_flags"])
            except NativeBuildError as error:
                problem = str(error)
        if problem is not None:
            say(f"tf_redsync: THE GPU KERNELS ARE NOT BUILT. {problem}")
        self.gpu = f"none: {self._cuda.get('missing', 'the build of the CUDA sources failed')}"
        return self._link(target, plans, [])


def build_preload(target):
    """Build the library that the launcher preloads into workers."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_name(target)
    cxx = shlex.split(os.environ.get("CXX") or "g++")
    sources = [*PRELOAD_SOURCES, "-ldl", "-o", str(partial)]
    run_compiler([*cxx, *LISTS["FLAGS"], "-shared", *sources], ROOT)
    publish(partial, target)


def processors():
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


def say(text):
    """Print a message for users."""
    print(text, file=sys.stderr, flush=True)


def main():
    """Run the build that the JSON on standard input requests."""
    wanted = json.load(sys.stdin)
    if wanted["kind"] == "core":
        return CoreBuild(ROOT / "build" / "objects").run()
    target = pathlib.Path(wanted["target"])
    if wanted["kind"] == "preload":
        return build_preload(target)
    NativeBuild(target.parent / "objects", wanted["tensorflow"], wanted["cuda"]).run(target)


if __name__ == "__main__":
    try:
        main()
    except (NativeBuildError, OSError) as problem:
        sys.exit(str(problem))
