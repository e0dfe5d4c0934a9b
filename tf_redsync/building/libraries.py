"""Chooses the native library for a TensorFlow, and builds it with custom_ops/build_library.py."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tf_redsync.building.once import LIMIT_SECONDS, BuildError, make_once, say

CACHE = "TF_REDSYNC_CACHE"  # a folder; else tf_redsync/ in XDG_CACHE_HOME, else in ~/.cache
_PACKAGE = Path(__file__).resolve().parents[1]
_KINDS = {".cc", ".h", ".cu", ".cuh", ".bzl", ".py"}
CUDA = "TF_REDSYNC_CUDA"  # "1": GPU kernels if nvcc exists; "0": never
_ARCHITECTURES = "REDSYNC_CUDA_ARCHITECTURES"
# Why a library has no GPU kernels: one library serves all three cases.
_CPU_ONLY = "when it was built, TensorFlow saw no GPU, no nvcc worked, or TF_REDSYNC_CUDA was 0"
_CUDA_FAILED = b"none: the build of the CUDA sources failed"  # as in custom_ops/build_library.py
# Measured cost of a build, announced before it: seconds, and further core seconds.
_COST = {"cpu": (8, 74), "cuda": (30, 130)}
_LONGEST = 300  # characters of a compiler's error
_FULL = "No space left|Disk quota"
_HOST_FLAG = r"-m(arch|cpu|tune)=native"  # as in custom_ops/build_library.py


def op_library(tensorflow: Mapping[str, Any], gpus: Sequence[str], *, show: bool = False) -> Path:
    """Return the native ops for one TensorFlow, from the cache folder or compiled now.

    Args:
        tensorflow: The result of `custom_ops/installed.py:tensorflow`; its entry "build"
            identifies the build among those of the same version.
        gpus: Compute capabilities, such as "80", of the visible GPUs.
        show: Whether to show the compilers' output, and to retry a failed build of GPU kernels.

    Raises:
        BuildError: If the library is missing and cannot be compiled.
    """
    compiler = _version_of_compiler()
    folder = _folder(f"tensorflow-{tensorflow['version']}", tensorflow)
    switch = os.environ.get(CUDA)
    kinds = ["cuda", "cpu"] if switch == "1" or (gpus and switch != "0") else ["cpu"]
    for kind in kinds:
        cuda = _cuda(gpus) if kind == "cuda" else {"missing": _CPU_ONLY}
        if compiler is None or (kind == "cuda" and "missing" in cuda):
            # The compiler was removed, for example from an image: use an older build.
            if existing := _newest_library(folder, kind if compiler else ""):
                return existing
            if show and compiler and kind == "cuda":
                say(f"no GPU kernels: {cuda.get('error', cuda['missing'])}")
            continue
        target = folder / f"{kind}-{_digest([compiler, cuda if kind == 'cuda' else None])}.so"
        label = f"the native library for TensorFlow {tensorflow['version']}"
        request = {"kind": kind, "tensorflow": dict(tensorflow), "cuda": cuda}
        return _build_once(target, label, request, show)
    raise BuildError(_no_compiler())


def has_gpu_kernels(library: Path) -> bool:
    """Return whether a library that `op_library` returned was built with GPU kernels."""
    return library.name.startswith("cuda-") and _CUDA_FAILED not in library.read_bytes()


def is_foreign(library: Path) -> bool:
    """Return whether a library is for another kind of processor, as in a tree that hosts share."""
    try:
        with open(library, "rb") as file, open("/proc/self/exe", "rb") as own:
            head, expected = file.read(20), own.read(20)
    except OSError:  # such as no /proc: the loader will tell
        return False
    return head[:4] == b"\x7fELF" and head[18:] != expected[18:]  # e_machine


def loopback_only() -> Path:
    """Return the library that the launcher preloads into workers; see `op_library`."""
    compiler = _version_of_compiler()
    folder = _folder("loopback_only", {})
    if compiler is None:
        if existing := _newest_library(folder):
            return existing
        raise BuildError(_no_compiler())
    target = folder / f"{_digest([compiler])}.so"
    return _build_once(target, "the launcher's library", {"kind": "preload"}, show=False)


def _newest_library(folder: Path, kind: str = "") -> Path | None:
    """Return the newest library in a folder, of the given kind if it is not ""."""
    try:
        libraries = list(folder.glob(f"{kind}*.so"))
    except OSError:  # for example the home directory of another user
        return None
    return max(libraries, key=lambda path: path.stat().st_mtime, default=None)


def _folder(name: str, made_for: Mapping[str, Any]) -> Path:
    """Return the folder of the libraries that this system can load, from any compiler."""
    places = ("include", "link_flags")  # paths, which depend on the environment
    properties = {key: value for key, value in made_for.items() if key not in places}
    flags = os.environ.get("CXXFLAGS", "")
    compiler = os.environ.get("CXX", "")  # it may have flags, too
    host = platform.node() if re.search(_HOST_FLAG, f"{compiler} {flags}") else ""
    system = [platform.machine(), *platform.libc_ver(), flags, host]
    digest = _digest([properties, system, digest_of_sources()])
    return cache() / "libraries" / f"{name}-{digest}"


def _build_once(target: Path, label: str, request: Mapping[str, Any], show: bool) -> Path:
    def make(lock: int) -> None:
        takes = _COST.get(request["kind"])
        cores = len(os.sched_getaffinity(0))
        if takes is not None:  # the launcher's library takes a second and is not announced
            seconds = takes[0] + takes[1] / cores
            say(f"building {label}, once: about {seconds:.0f} s on {cores} cores ({target.parent})")
        started = time.monotonic()
        _run({**request, "target": str(target)}, lock, show)
        if takes is not None:
            say(f"built it in {time.monotonic() - started:.0f} s")

    wanted = show and request["kind"] == "cuda" and target.is_file()
    make_once(target, label, make, again=wanted and not has_gpu_kernels(target))
    return target


def _run(request: Mapping[str, Any], lock: int, show: bool) -> None:
    """Compile in a child process, which Ctrl-C also ends."""
    stream = None if show else subprocess.PIPE
    try:
        run = subprocess.run(
            [sys.executable, str(sources() / "custom_ops" / "build_library.py")],
            input=json.dumps(request),
            stdout=stream,
            stderr=stream,
            text=True,
            timeout=LIMIT_SECONDS,
            pass_fds=(lock,),
            env={**os.environ, CACHE: str(cache())},
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"The build took more than {LIMIT_SECONDS / 60:.0f} minutes") from error
    except OSError as error:
        raise BuildError(f"{sys.executable} cannot be started ({error})") from error
    if run.returncode != 0:
        reason = "see above" if show else first_error(run.stderr)
        remedy = "Fix it" if show else "`python -m tf_redsync build` shows the whole output"
        if re.search(_FULL, reason):
            remedy = "Free some space there, or set TF_REDSYNC_CACHE to another folder"
        raise BuildError(f"The build of the native library failed ({reason}). {remedy}")
    if not show and "tf_redsync: " in run.stderr:
        say(
            f"the GPU kernels are not built ({first_error(run.stderr)}). "
            "`python -m tf_redsync build` shows the whole output and retries"
        )


def first_error(text: str) -> str:
    """Return the most informative line of a compiler's output."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    summary = "collect2: error: ld returned"  # follows the linker's message
    linker = (line for line, after in itertools.pairwise(lines) if after.startswith(summary))
    signs = (_FULL, r"\berror:", r"\bError\b")
    errors = (line for sign in signs for line in lines if re.search(sign, line))
    return [*linker, *errors, *lines[-1:], "no output"][0][:_LONGEST]


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX") or "g++")


@functools.cache
def _version_of_compiler() -> str | None:
    try:
        run = subprocess.run(
            [*_compiler(), "--version"], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return shlex.join(_compiler()) + run.stdout if run.returncode == 0 else None


def _no_compiler() -> str:
    return (
        f"There is no C++ compiler `{shlex.join(_compiler())}` to build the native library with. "
        "Install one (Debian, Ubuntu: apt-get install g++) or name yours in CXX"
    )


def _cuda(gpus: Sequence[str]) -> dict[str, Any]:
    """Return the CUDA installation that custom_ops/installed.py finds for these GPUs."""
    env = {
        **os.environ,
        _ARCHITECTURES: os.environ.get(_ARCHITECTURES) or " ".join(sorted(set(gpus))),
    }
    program = sources() / "custom_ops" / "installed.py"
    try:
        run = subprocess.run(
            [sys.executable, str(program), "cuda"],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
        )
        installation: dict[str, Any] = json.loads(run.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return {"missing": "custom_ops/installed.py, which looks for nvcc, does not run"}
    return installation


def _digest(made_of: Any) -> str:
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:16]


# -------------------------------------------------------------------------------------- folders


def cache() -> Path:
    """Return the folder for libraries and objects, which may be missing.

    Raises:
        BuildError: If no variable names one and the user has no home directory.
    """
    if named := os.environ.get(CACHE):
        return Path(os.path.expanduser(named)).absolute()
    folder = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(folder):  # the XDG specification ignores relative paths
        folder = os.path.expanduser("~/.cache")
    if not os.path.isabs(folder):  # no HOME, and no entry in /etc/passwd, as in some containers
        raise BuildError(
            "This user has no home directory for the native library. Set TF_REDSYNC_CACHE to a "
            "writable folder"
        )
    return Path(folder) / "tf_redsync"


def sources() -> Path:
    """Return the parent of `custom_ops/`: in an installed package, or in a source tree."""
    carried = _PACKAGE / "_native"
    return carried if carried.is_dir() else _PACKAGE.parent


@functools.cache
def digest_of_sources() -> str:
    """Return a digest of the C++ sources and of the build scripts."""
    root = sources() / "custom_ops"
    return _digest_of_files(root, (path for path in root.rglob("*") if path.suffix in _KINDS))


@functools.cache
def digest_of_package() -> str:
    """Return a digest of the package's Python sources and of `digest_of_sources`.

    It is the same for a source tree and for a package that is installed from it. A package that was
    installed without C++ sources is compared by its Python sources.
    """

    def is_module(path: Path) -> bool:
        folders = path.relative_to(_PACKAGE).parts
        return folders[0] != "_native" and not any(part.startswith(".") for part in folders)

    modules = filter(is_module, _PACKAGE.rglob("*.py"))
    return _digest([_digest_of_files(_PACKAGE, modules), digest_of_sources()])


def _digest_of_files(root: Path, files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
