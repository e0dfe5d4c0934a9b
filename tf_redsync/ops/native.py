"""Loads the native library and chooses the backend of the ops.

A library serves one version of TensorFlow. In a source tree `setup.py` or Bazel may have built it
in place. Elsewhere it is built at first use, see `tf_redsync/building/`.
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
_FOLDERS, _COMPILED = ("core", "kernels", "ops"), {".cc", ".h", ".cu", ".cuh"}  # of sources
_ACCEPT = "TF_REDSYNC_BACKEND=tensorflow accepts the pure-TensorFlow ops without this line."
REBUILD = "python setup.py build_ext --inplace"  # builds `LIBRARY`
# A marker in the library file, so that its TensorFlow version can be read before it is loaded.
_MARKER = re.compile(rb"REDSYNC_BUILT_FOR_TENSORFLOW=([^;\x00]+);")


_forced: str | None = None  # the argument of `set_backend`


class NativeLibraryError(RuntimeError):
    """The native library cannot be built, was built for another TensorFlow, or does not load."""


def built_for(path: pathlib.Path = LIBRARY) -> str | None:
    """Return the version of TensorFlow that the library at `path` was built for, or `None`."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        match = _MARKER.search(data)
        return match.group(1).decode() if match else None


def check(path: pathlib.Path = LIBRARY) -> None:
    """Raise `NativeLibraryError` if the library at `path` must not be loaded."""
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
    """Return the library for this TensorFlow. A missing one is built, in one or two minutes.

    Raises:
        NativeLibraryError: If it is missing and cannot be built.
    """
    if is_in_place():
        _warn_of_newer_source()
        return LIBRARY
    return build()


def is_in_place() -> bool:
    """Return whether a library that fits was built in place; it takes precedence."""
    exists = LIBRARY.is_file() and LIBRARY.stat().st_size > 0
    fits = exists and built_for(LIBRARY) == tf.__version__
    return fits and not libraries.is_foreign(LIBRARY)


def _warn_of_newer_source() -> None:
    built = LIBRARY.stat().st_mtime
    folder = libraries.sources() / "custom_ops"
    for path in (p for name in _FOLDERS for p in (folder / name).rglob("*")):
        # A digest of the sources is exact, but it takes ten times as long.
        if path.suffix in _COMPILED and path.is_file() and path.stat().st_mtime > built:
            _log.warning("%s is older than %s. Build it again: %s.", LIBRARY, path, REBUILD)
            return


def build(*, show: bool = False) -> pathlib.Path:
    """Return the library in the cache folder. A missing one is built.

    Args:
        show: Whether to show the compilers' output, and to retry a failed build of GPU kernels.

    Raises:
        NativeLibraryError: If it is missing and cannot be built.
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
    """Return the compute capabilities of the visible GPUs, such as "80" and "90"."""
    gpus = tf.config.get_visible_devices("GPU")
    details = (tf.config.experimental.get_device_details(gpu) for gpu in gpus)
    capabilities = (detail.get("compute_capability") for detail in details)
    return sorted({"".join(map(str, capability)) for capability in capabilities if capability})


@functools.cache
def load() -> Any:
    """Load the native library, once per process.

    Returns:
        The module of generated op wrappers.

    Raises:
        NativeLibraryError: If the library cannot be built or loaded; later, if the module has no
            op of a requested name. The message is one line with the reason and the remedy.
    """
    path = library()
    check(path)

    def older(name: str) -> Any:
        if not name.startswith("redsync_"):
            raise AttributeError(name)
        raise NativeLibraryError(
            f"The native library {path} is older than this source tree: it has no op `{name}`. "
            f"Build it again: {REBUILD}. {_ACCEPT}"
        )

    try:
        module = tf.load_op_library(str(path))
        module.__getattr__ = older  # Python calls it for missing names
        return module
    except (tf.errors.OpError, OSError) as error:
        reason = " ".join(str(error).split())
        raise NativeLibraryError(
            f"The native library {path} does not load ({reason}). Remove the file to rebuild "
            f"it. {_ACCEPT}"
        ) from error


@functools.cache
def gpu_build() -> str:
    """Return the GPUs that the library has kernels for, or "none: " and the reason."""
    load()
    text = ctypes.CDLL(str(library())).redsync_gpu
    text.restype = ctypes.c_char_p
    return text().decode()


def has_gpu_kernels() -> bool:
    """Return whether the library has GPU kernels; see `gpu_problem` for whether they run here."""
    return not gpu_build().startswith("none")


def gpu_problem() -> str:
    """Return the reason why the native ops do not run on the visible GPUs; "" if they do."""
    return _problem_of_gpus() if has_gpu_kernels() else gpu_build().partition(": ")[2]


@functools.cache
def _problem_of_gpus() -> str:
    """Return the first error of the CUDA runtime library on a visible GPU, or ""."""
    ask = ctypes.CDLL(str(library())).redsync_gpu_problem
    ask.argtypes, ask.restype = [ctypes.c_int], ctypes.c_char_p
    # A question about other GPUs would take memory of them.
    numbers = [int(gpu.name.rsplit(":", 1)[1]) for gpu in tf.config.get_visible_devices("GPU")]
    return next(filter(None, (ask(number).decode() for number in numbers or [0])), "")


def serves(tensors: Sequence[tf.Tensor | tf.Variable]) -> bool:
    """Return whether the library has kernels for the devices of the tensors.

    A tensor on a GPU needs a library with GPU kernels, and a driver and a GPU that run them. If
    they do not run, the pure-TensorFlow ops are used, with one warning.
    """
    if are_on_cpus(tensors) or not gpu_problem():
        return True
    _say_no_gpu_kernels()
    return False


def are_on_cpus(tensors: Sequence[tf.Tensor | tf.Variable]) -> bool:
    """Return whether all tensors are on CPUs."""
    # In a graph a tensor without a device may be placed on a visible GPU.
    anywhere = not tf.config.get_visible_devices("GPU")
    return all("GPU" not in d and (anywhere or "CPU" in d) for d in (t.device for t in tensors))


def adds_in_order(variables: Sequence[tf.Variable]) -> bool:
    """Return whether updates of the same element of a variable are applied in their order.

    TensorFlow's scatter on a GPU has no order.
    """
    return are_on_cpus(variables) or runs_natively(variables)


@functools.cache
def _say_no_gpu_kernels() -> None:
    _log.warning(
        "The native ops do not run on these GPUs (%s), so the slower ops in pure TensorFlow are "
        "used. Put an nvcc, the CUDA compiler, that matches the driver on PATH, and run "
        "`python -m tf_redsync build`.",
        gpu_problem(),
    )


def set_backend(name: str | None) -> None:
    """Force one backend for new ops, or restore the automatic choice.

    Graphs that are already traced keep their backend. Call it before optimizers are built, which
    choose between sparse and dense totals by the backend.

    Args:
        name: "native", "tensorflow", or `None` for the environment variable or the automatic
            choice.

    Raises:
        ValueError: If `name` is another value.
        NativeLibraryError: If "native" is requested and cannot be loaded.
    """
    global _forced
    if name is not None:
        _check_backend(name, "`name`")
        if name == "native":
            load()
    _forced = name


def backend() -> str:
    """Return the backend in use: "native" or "tensorflow"."""
    return _choose()[0]


def backend_reason() -> str:
    """Return the reason for the choice of `backend()`, in one sentence."""
    return _choose()[1]


def runs_natively(tensors: Sequence[tf.Tensor | tf.Variable]) -> bool:
    """Return whether an op on these tensors runs natively, by backend and devices.

    Args:
        tensors: The op's inputs.
    """
    return _choose()[0] == "native" and serves(tensors)


def _check_backend(name: str, origin: str) -> None:
    if name not in BACKENDS:
        raise ValueError(f"{origin} must be 'native' or 'tensorflow'. Received: {name!r}.")


def _choose() -> tuple[str, str]:
    if _forced is not None:
        return _forced, "forced by set_backend"
    name = os.environ.get("TF_REDSYNC_BACKEND")
    return _forced_by_environment(name) if name else _try_native()


def _forced_by_environment(name: str) -> tuple[str, str]:
    _check_backend(name, "The environment variable TF_REDSYNC_BACKEND")
    if name == "native":
        load()
    return name, "forced by the environment variable TF_REDSYNC_BACKEND"


@functools.cache
def _try_native() -> tuple[str, str]:
    """Choose the native library if it loads; otherwise warn once."""
    try:
        load()
    except NativeLibraryError as error:
        _log.warning("The ops run in pure TensorFlow, which is slower. %s", error)
        return "tensorflow", str(error)
    reason = f"the native library for TensorFlow {tf.__version__} is loaded"
    _log.info("The ops run natively: %s.", reason)
    return "native", reason
