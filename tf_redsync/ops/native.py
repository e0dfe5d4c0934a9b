"""Loads the native library, built by `setup.py` (or Bazel) for one version of TensorFlow."""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_redsync.ops.contract import Selection
from tf_redsync.ops.message_layout import MessageLayout

LIBRARY = pathlib.Path(__file__).with_name("_redsync_ops.so")
_log = logging.getLogger("tf_redsync")
REBUILD = "pip install --force-reinstall --no-deps ."
# The library carries this text, so that its TensorFlow is known before any of its code runs.
_MARKER = re.compile(rb"REDSYNC_BUILT_FOR_TENSORFLOW=([^;\x00]+);")


class NativeLibraryError(RuntimeError):
    """The native library is missing, was built for another TensorFlow, or does not load."""


def built_for(path: pathlib.Path = LIBRARY) -> str | None:
    """Version of TensorFlow that the library at `path` was built for; None if it does not say."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        found = _MARKER.search(data)
        return found.group(1).decode() if found else None


def check(path: pathlib.Path = LIBRARY) -> None:
    """Raises `NativeLibraryError` if the library at `path` must not be loaded."""
    remedy = (
        f"Build it for this TensorFlow with `{REBUILD}` in the source tree, or use the "
        "pure-TensorFlow ops by setting TF_REDSYNC_BACKEND=tensorflow."
    )
    if not path.is_file() or path.stat().st_size == 0:
        raise NativeLibraryError(f"There is no native library at {path}. {remedy}")
    version = built_for(path)
    if version != tf.__version__:
        raise NativeLibraryError(
            f"The native library {path} was built for TensorFlow {version or 'unknown'}, but "
            f"TensorFlow {tf.__version__} is installed. {remedy}"
        )


@functools.cache
def load() -> Any:
    """Loads the native library once per process.

    Returns:
        The module of generated op wrappers.

    Raises:
        NativeLibraryError: if the library is missing, was built for another version of TensorFlow
            or cannot be loaded. The message says what to do.
    """
    check()
    try:
        return tf.load_op_library(str(LIBRARY))
    except (tf.errors.OpError, OSError) as error:
        raise NativeLibraryError(
            f"The native library {LIBRARY} does not load: {error}. Build it again with "
            f"`{REBUILD}` in the source tree, or use the pure-TensorFlow ops by setting "
            "TF_REDSYNC_BACKEND=tensorflow."
        ) from error


@functools.cache
def gpu_build() -> str:
    """What GPUs the library has kernels for, or "none: " and why there are none."""
    load()
    text = ctypes.CDLL(str(LIBRARY)).redsync_gpu
    text.restype = ctypes.c_char_p
    return text().decode()


def has_gpu_kernels() -> bool:
    """Whether the ops can run on a GPU."""
    return not gpu_build().startswith("none")


def serves(tensors: Sequence[tf.Tensor | tf.Variable]) -> bool:
    """Whether the library has kernels for the devices that the tensors are placed on.

    A tensor on a GPU needs a library with GPU kernels. Without, the pure-TensorFlow ops have to do,
    and this says so once.
    """
    if not any("GPU" in t.device.upper() for t in tensors) or has_gpu_kernels():
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
        "The native library has no GPU kernels (%s): on GPUs the ops run in pure TensorFlow, which "
        "is slower. Install again with nvcc, the CUDA compiler, on PATH.",
        gpu_build(),
    )


def accumulate_and_select(*, layout: MessageLayout, **arguments: Any) -> Selection:
    """See `tf_redsync.ops.accumulate_and_select`; all arguments are given and already checked."""
    message, residuals, velocities, ratios = load().redsync_accumulate_and_select(
        quantized=layout.quantized, **arguments
    )
    return Selection(message, residuals, velocities, ratios, layout)


def decode(
    messages: tf.Tensor, layout: MessageLayout, like: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """See `tf_redsync.ops.decode`; all arguments are given and already checked."""
    return load().redsync_decode(
        messages=messages,
        k=layout.k,
        like=like,
        selectors=["exact"] * len(like),  # the op has the attribute; messages do not depend on it
        quantized=layout.quantized,
    )
