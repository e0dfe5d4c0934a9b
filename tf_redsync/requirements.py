"""Checks of the system and of packages that pip does not install: TensorFlow and tf_keras.

TensorFlow is distributed as `tensorflow`, `tensorflow-cpu` and others, which overwrite each other's
files. So this package cannot depend on any of them. tf_keras depends on `tensorflow`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
import warnings

_OLDEST, _NEWEST = (2, 16), (2, 21)  # pyproject.toml has the same range
_OLDEST_KERAS = (3, 10)  # as in pyproject.toml; pip lets a later installation replace Keras


def check_system() -> None:
    """Raise `ImportError` on other systems than Linux, which lack modules that others import."""
    if sys.platform != "linux":
        raise ImportError(f"tf_redsync needs Linux. Received: {sys.platform}.")


def check_tensorflow() -> None:
    """Raise `ImportError` without a TensorFlow that is recent enough; warn of a newer one."""
    try:
        version = _version_of("tensorflow")
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
        version = ""
    if not version:  # also if another package left an empty folder of this name
        raise ImportError(
            "TensorFlow is not installed, and tf_redsync needs TensorFlow 2.16 to 2.21. Install "
            "`tensorflow`, `tensorflow-cpu` or `tensorflow[and-cuda]` with pip."
        )
    release = _release(version)
    if release < _OLDEST:
        raise ImportError(
            f"tf_redsync needs TensorFlow 2.16 or later. Received: TensorFlow {version}."
        )
    if release > _NEWEST:
        warnings.warn(
            f"tf_redsync is tested with TensorFlow 2.16 to 2.21. Received: TensorFlow {version}.",
            stacklevel=2,
        )


def check_backend(backend: str) -> None:
    """Raise `ImportError` for Keras on JAX or PyTorch, which `tf.distribute` does not support."""
    if backend != "tensorflow":
        raise ImportError(
            "tf_redsync needs Keras on TensorFlow. Received: the Keras backend "
            f"{backend!r}. Set KERAS_BACKEND=tensorflow before Keras is imported."
        )


def check_keras() -> None:
    """Raise `ImportError` if Keras is too old, or hidden by a file such as `keras.py`."""
    version = _version_of("keras")
    if version and _release(version) < _OLDEST_KERAS:
        raise ImportError(
            f"tf_redsync needs Keras 3.10 or later. Received: Keras {version}. Run "
            "pip install 'keras>=3.10'."
        )


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def _version_of(name: str) -> str:
    """Return the version of a package; empty for an empty folder.

    Raises:
        ImportError: `name` is a file of the user, such as one beside the script.
    """
    module = importlib.import_module(name)
    version: str = getattr(module, "__version__", "")
    file = getattr(module, "__file__", None)
    if not version and file:
        raise ImportError(
            f"`import {name}` loads {file}, which hides the package {name!r}. Rename that file."
        )
    return version


def no_tf_keras() -> ImportError:
    """Return the error for a missing tf_keras, with the command that installs it."""
    version: str = importlib.import_module("tensorflow").__version__
    command = f"pip install 'tf_keras=={'.'.join(version.split('.')[:2])}.*'"
    try:
        importlib.metadata.version("tensorflow")
    except importlib.metadata.PackageNotFoundError:
        command += " --no-deps"  # otherwise `tensorflow` would overwrite `tensorflow-cpu`
    return ImportError(
        "tf_keras is not installed. Optimizers of tf_keras and of TensorFlow Addons need it in "
        f"the same version as TensorFlow: {command}"
    )


def wants_legacy_keras() -> bool:
    """Return whether `tf.keras` is tf_keras, by the rule of TensorFlow."""
    return os.environ.get("TF_USE_LEGACY_KERAS") in ("true", "True", "1")


def check_legacy_keras() -> None:
    """Warn if `tf.keras` must be tf_keras, which is not installed; TensorFlow's error omits it."""
    if wants_legacy_keras() and importlib.util.find_spec("tf_keras") is None:
        warnings.warn(
            f"TF_USE_LEGACY_KERAS is set, so `tf.keras` is tf_keras. {no_tf_keras()}", stacklevel=2
        )
