"""The native library, built for one version of TensorFlow, and the choice of the backend.

In a source tree it may have been built in place, by `setup.py` or Bazel. Everywhere else it is
built when it is first asked for, see `tf_redsync/building/`.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_redsync.building import BuildError, libraries

LIBRARY = pathlib.Path(__file__).with_name("_redsync_ops.so")  # built in place
_log = logging.getLogger("tf_redsync")
BACKENDS = ("native", "tensorflow")
_ACCEPT = "TF_REDSYNC_BACKEND=tensorflow accepts the pure-TensorFlow ops without this line."
# The library carries this text, so that its TensorFlow is known before any of its code runs.
_MARKER = re.compile(rb"REDSYNC_BUILT_FOR_TENSORFLOW=([^;\x00]+);")


_forced: str | None = None  # by `set_backend`


class NativeLibraryError(RuntimeError):
    """The native library cannot be built, was built for another TensorFlow, or does not load."""


def built_for(path: pathlib.Path = LIBRARY) -> str | None:
    """Version of TensorFlow that the library at `path` was built for; None if it does not say."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        found = _MARKER.search(data)
        return found.group(1).decode() if found else None


def check(path: pathlib.Path = LIBRARY) -> None:
    """Raises `NativeLibraryError` if the library at `path` must not be loaded."""
    if not path.is_file() or path.stat().st_size == 0:
        raise NativeLibraryError(f"There is no native library at {path}. {_ACCEPT}")
    version = built_for(path)
    if version != tf.__version__:
        raise NativeLibraryError(
            f"The native library {path} was built for TensorFlow {version or 'unknown'}, but "
            f"TensorFlow {tf.__version__} is installed. Remove the file. {_ACCEPT}"
        )


@functools.cache
def library() -> pathlib.Path:
    """The library for this TensorFlow; built now if there is none, which takes a minute or two.

    Raises:
        NativeLibraryError: if there is none and it cannot be built.
    """
    if LIBRARY.is_file() and LIBRARY.stat().st_size and built_for(LIBRARY) == tf.__version__:
        return LIBRARY
    return build()


def build(*, show: bool = False) -> pathlib.Path:
    """The library in the cache folder; built now if there is none.

    Args:
        show: Whether to show what the compilers say.

    Raises:
        NativeLibraryError: if there is none and it cannot be built.
    """
    flags = [flag for flag in tf.sysconfig.get_compile_flags() if not flag.startswith("-I")]
    tensorflow = {
        "version": tf.__version__,
        "commit": tf.version.GIT_VERSION,
        "include": tf.sysconfig.get_include(),
        "compile_flags": flags,
        "link_flags": tf.sysconfig.get_link_flags(),
        "build": dict(tf.sysconfig.get_build_info()),
    }
    try:
        return libraries.op_library(tensorflow, _compute_capabilities(), show=show)
    except BuildError as error:
        raise NativeLibraryError(f"{error}. {_ACCEPT}") from error


def _compute_capabilities() -> list[str]:
    """Of the GPUs that TensorFlow may use: "80", "90"."""
    gpus = tf.config.get_visible_devices("GPU")
    details = (tf.config.experimental.get_device_details(gpu) for gpu in gpus)
    found = (detail.get("compute_capability") for detail in details)
    return sorted({"".join(map(str, capability)) for capability in found if capability})


@functools.cache
def load() -> Any:
    """Loads the native library once per process.

    Returns:
        The module of generated op wrappers.

    Raises:
        NativeLibraryError: if the library cannot be built or loaded. The message, one line, says
            why and what to do.
    """
    path = library()
    check(path)
    try:
        return tf.load_op_library(str(path))
    except (tf.errors.OpError, OSError) as error:
        reason = " ".join(str(error).split())
        raise NativeLibraryError(
            f"The native library {path} does not load ({reason}). Remove the file, to have it "
            f"built again. {_ACCEPT}"
        ) from error


@functools.cache
def gpu_build() -> str:
    """What GPUs the library has kernels for, or "none: " and why there are none."""
    load()
    text = ctypes.CDLL(str(library())).redsync_gpu
    text.restype = ctypes.c_char_p
    return text().decode()


def has_gpu_kernels() -> bool:
    """Whether the library has kernels for GPUs; `gpu_problem` says whether they run here."""
    return not gpu_build().startswith("none")


def gpu_problem() -> str:
    """Why the native ops do not run on the GPUs that are visible; "" if they do."""
    return _problem_of_gpus() if has_gpu_kernels() else gpu_build().partition(": ")[2]


@functools.cache
def _problem_of_gpus() -> str:
    """What the CUDA run-time library says."""
    ask = ctypes.CDLL(str(library())).redsync_gpu_problem
    ask.restype = ctypes.c_char_p
    return ask().decode()


def serves(tensors: Sequence[tf.Tensor | tf.Variable]) -> bool:
    """Whether the library has kernels for the devices that the tensors are placed on.

    A tensor on a GPU needs a library with GPU kernels, and a driver and a GPU that can run them.
    Without, the pure-TensorFlow ops have to do, and this says so once.
    """
    on_gpu = "GPU" in "".join([t.device.upper() for t in tensors])
    if not on_gpu or not gpu_problem():
        return True
    _say_no_gpu_kernels()
    return False


def are_on_cpus(tensors: Sequence[tf.Tensor | tf.Variable]) -> bool:
    """Whether none of the tensors can be on a GPU."""
    # In a graph a tensor without a device may end up on a GPU, if there is one.
    anywhere = not tf.config.get_visible_devices("GPU")
    return all("GPU" not in d and (anywhere or "CPU" in d) for d in (t.device for t in tensors))


@functools.cache
def _say_no_gpu_kernels() -> None:
    _log.warning(
        "The native ops do not run on the GPUs here (%s): there they run in pure TensorFlow, which "
        "is slower. Put nvcc, the CUDA compiler, of a version for this driver on PATH, and run "
        "`python -m tf_redsync build`.",
        gpu_problem(),
    )


def set_backend(name: str | None) -> None:
    """Forces one backend for ops built from now on, or returns to the automatic choice.

    Graphs that are already traced keep theirs.

    Args:
        name: "native", "tensorflow", or None for the environment variable or the automatic choice.

    Raises:
        ValueError: for any other name.
        NativeLibraryError: if "native" is asked for and cannot be loaded.
    """
    global _forced
    if name is not None:
        _check_backend(name, "`name`")
        if name == "native":
            load()
    _forced = name


def backend() -> str:
    """Which implementation runs: "native" or "tensorflow"."""
    return _choose()[0]


def backend_reason() -> str:
    """Why `backend()` is what it is, in one sentence."""
    return _choose()[1]


def runs_natively(tensors: Sequence[tf.Tensor | tf.Variable]) -> bool:
    """Whether an op on these tensors runs natively: the backend, on the devices that they are on.

    Args:
        tensors: What the op works on.
    """
    return _choose()[0] == "native" and serves(tensors)


def _check_backend(name: str, origin: str) -> None:
    if name not in BACKENDS:
        raise ValueError(f"{origin} must be 'native' or 'tensorflow'. Received: {name!r}.")


def _choose() -> tuple[str, str]:
    if _forced is not None:
        return _forced, "forced by set_backend"
    name = os.environ.get("TF_REDSYNC_BACKEND")
    return _of_environment(name) if name else _try_native()


def _of_environment(name: str) -> tuple[str, str]:
    _check_backend(name, "The environment variable TF_REDSYNC_BACKEND")
    if name == "native":
        load()
    return name, "forced by the environment variable TF_REDSYNC_BACKEND"


@functools.cache
def _try_native() -> tuple[str, str]:
    """Prefers the native library; says once, aloud, why it is not used."""
    try:
        load()
    except NativeLibraryError as error:
        _log.warning("The ops run in pure TensorFlow, which is slower. %s", error)
        return "tensorflow", str(error)
    reason = f"the native library for TensorFlow {tf.__version__} is loaded"
    _log.info("The ops run natively: %s.", reason)
    return "native", reason
