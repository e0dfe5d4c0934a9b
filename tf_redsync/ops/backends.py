"""Which implementation of the ops runs: the native library, or pure TensorFlow."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import tensorflow as tf

from tf_redsync.ops import native
from tf_redsync.ops.native import NativeLibraryError

BACKENDS = ("native", "tensorflow")
_log = logging.getLogger("tf_redsync")
_forced: str | None = None
_automatic: tuple[str, str] | None = None  # (backend, reason), decided once


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
            native.load()
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
    return backend() == "native" and native.serves(tensors)


def _check_backend(name: str, origin: str) -> None:
    if name not in BACKENDS:
        raise ValueError(f"{origin} must be 'native' or 'tensorflow'. Received: {name!r}.")


def _choose() -> tuple[str, str]:
    if _forced is not None:
        return _forced, "forced by set_backend"
    name = os.environ.get("TF_REDSYNC_BACKEND")
    if name:
        _check_backend(name, "The environment variable TF_REDSYNC_BACKEND")
        if name == "native":
            native.load()
        return name, "forced by the environment variable TF_REDSYNC_BACKEND"
    global _automatic
    if _automatic is None:
        _automatic = _try_native()
    return _automatic


def _try_native() -> tuple[str, str]:
    """Prefers the native library; says once, aloud, why it is not used."""
    try:
        native.load()
    except NativeLibraryError as error:
        _log.warning("The ops run in pure TensorFlow, which is slower. %s", error)
        return "tensorflow", str(error)
    reason = f"the native library for TensorFlow {tf.__version__} is loaded"
    _log.info("The ops run natively: %s.", reason)
    return "native", reason
