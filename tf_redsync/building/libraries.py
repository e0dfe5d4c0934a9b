"""Which native library is wanted, and how it is made: by custom_ops/build_library.py."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tf_redsync.building import folders
from tf_redsync.building.once import LIMIT_SECONDS, BuildError, make_once, say

CUDA = "TF_REDSYNC_CUDA"  # "1": kernels for GPUs wherever nvcc is; "0": never
_ARCHITECTURES = "REDSYNC_CUDA_ARCHITECTURES"
_NO_GPU = "TensorFlow saw no GPU when the library was built (TF_REDSYNC_CUDA=1 builds them even so)"
# Seconds, and further seconds of one core, measured; said before a build.
_COST = {"cpu": (10, 100), "cuda": (30, 160)}
_LONGEST = 300  # characters of a compiler's error
_FULL = "No space left|Disk quota"


def op_library(tensorflow: Mapping[str, Any], gpus: Sequence[str], *, show: bool = False) -> Path:
    """The native ops for one TensorFlow: from the cache folder, or compiled now.

    Args:
        tensorflow: What `custom_ops/installed.py:tensorflow` would find, and under "build" what
            else tells this TensorFlow from others of its version.
        gpus: Compute capabilities, such as "80", of the GPUs that it sees.
        show: Whether to show what the compilers say.

    Raises:
        BuildError: if there is none and it cannot be compiled.
    """
    compiler = _version_of_compiler()
    folder = _folder(f"tensorflow-{tensorflow['version']}", tensorflow)
    switch = os.environ.get(CUDA)
    kinds = ["cuda", "cpu"] if switch == "1" or (gpus and switch != "0") else ["cpu"]
    for kind in kinds:
        cuda = _cuda(gpus) if kind == "cuda" else {"missing": _NO_GPU}
        if compiler is None or (kind == "cuda" and "missing" in cuda):
            # What compiled it has gone: an image without compilers, for one.
            if there := _there(folder, kind if compiler else ""):
                return there
            continue
        target = folder / f"{kind}-{_digest([compiler, cuda if kind == 'cuda' else None])}.so"
        what = f"the native library for TensorFlow {tensorflow['version']}"
        request = {"kind": kind, "tensorflow": dict(tensorflow), "cuda": cuda}
        return _made(target, what, request, show)
    raise BuildError(_no_compiler())


def loopback_only() -> Path:
    """The library that the launcher preloads into workers; see `op_library`."""
    compiler = _version_of_compiler()
    folder = _folder("loopback_only", {})
    if compiler is None:
        if there := _there(folder):
            return there
        raise BuildError(_no_compiler())
    target = folder / f"{_digest([compiler])}.so"
    return _made(target, "the launcher's library", {"kind": "preload"}, show=False)


def _there(folder: Path, kind: str = "") -> Path | None:
    """The newest library in a folder, one of this kind if it is named."""
    found = folder.glob(f"{kind}*.so")
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _folder(name: str, made_for: Mapping[str, Any]) -> Path:
    """The folder of the libraries that this system can use, whatever compiled them."""
    places = ("include", "link_flags")  # The same TensorFlow in another environment is the same.
    kept = {key: value for key, value in made_for.items() if key not in places}
    flags = os.environ.get("CXXFLAGS", "")  # -march=native is another one's elsewhere
    system = [platform.machine(), *platform.libc_ver(), flags, flags and platform.node()]
    digest = _digest([kept, system, folders.digest_of_sources()])
    return folders.cache() / "libraries" / f"{name}-{digest}"


def _made(target: Path, what: str, request: Mapping[str, Any], show: bool) -> Path:
    def make(lock: int) -> None:
        takes = _COST.get(request["kind"])
        cores = len(os.sched_getaffinity(0))
        if takes is not None:  # The launcher's takes a second.
            seconds = takes[0] + takes[1] / cores
            say(f"building {what}, once: about {seconds:.0f} s on {cores} cores ({target.parent})")
        started = time.monotonic()
        _run({**request, "target": str(target)}, lock, show)
        if takes is not None:
            say(f"built it in {time.monotonic() - started:.0f} s")

    make_once(target, what, make)
    return target


def _run(request: Mapping[str, Any], lock: int, show: bool) -> None:
    """Compiles in a process of its own, which Ctrl-C ends as well as this one."""
    stream = None if show else subprocess.PIPE
    try:
        run = subprocess.run(
            [sys.executable, str(folders.sources() / "custom_ops" / "build_library.py")],
            input=json.dumps(request),
            stdout=stream,
            stderr=stream,
            text=True,
            timeout=LIMIT_SECONDS,
            pass_fds=(lock,),
            env={**os.environ, folders.CACHE: str(folders.cache())},
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"The build took more than {LIMIT_SECONDS / 60:.0f} minutes") from error
    except OSError as error:
        raise BuildError(f"{sys.executable} cannot be started ({error})") from error
    if run.returncode != 0:
        reason = "see above" if show else first_error(run.stderr)
        remedy = "Mend that" if show else "`python -m tf_redsync build` shows all of it"
        if re.search(_FULL, reason):
            remedy = "Make room there, or set TF_REDSYNC_CACHE to another folder"
        raise BuildError(f"The build of the native library failed ({reason}). {remedy}")


def first_error(text: str) -> str:
    """The line of a compiler's output that says most."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    signs = (_FULL, r"\berror:", r"\bError\b")
    found = (line for sign in signs for line in lines if re.search(sign, line))
    return next(found, lines[-1] if lines else "it says nothing")[:_LONGEST]


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
    """What custom_ops/installed.py finds of CUDA, for these GPUs."""
    env = {
        **os.environ,
        _ARCHITECTURES: os.environ.get(_ARCHITECTURES) or " ".join(sorted(set(gpus))),
    }
    program = folders.sources() / "custom_ops" / "installed.py"
    try:
        run = subprocess.run(
            [sys.executable, str(program), "cuda"],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
        )
        found: dict[str, Any] = json.loads(run.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return {"missing": "what looks for nvcc does not run"}
    return found


def _digest(made_of: Any) -> str:
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:16]
