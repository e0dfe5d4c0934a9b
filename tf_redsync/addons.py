"""TensorFlow Addons on a current TensorFlow."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from types import ModuleType

from tf_redsync import requirements

_ALIASED = ("engine", "engine.keras_tensor", "backend", "utils", "utils.tf_utils")


def load() -> ModuleType:
    """Import `tensorflow_addons` 0.23 on TensorFlow 2.16 and later.

    Addons imports Keras 2 from `keras.src`, which is Keras 3 now. During the import of Addons only,
    those modules are aliases of the ones in `tf_keras`, which is Keras 2. `tf.keras` must be Keras
    2, so call this before anything uses `tf.keras`, or start the program with
    TF_USE_LEGACY_KERAS=1.

    Returns:
        The module `tensorflow_addons`. Its optimizers are wrapped like any other:
        `DistributedOptimizer(load().optimizers.LAMB(0.01), method)`.

    Raises:
        ImportError: `tensorflow-addons` or `tf_keras` is not installed, or `tf.keras` is already
            Keras 3.

    Example:
        tfa = tf_redsync.addons.load()
        optimizer = tf_redsync.DistributedOptimizer(tfa.optimizers.LAMB(0.01), method)
    """
    if "tensorflow_addons" in sys.modules:
        return sys.modules["tensorflow_addons"]
    if importlib.util.find_spec("tf_keras") is None:
        raise requirements.no_tf_keras()
    if importlib.util.find_spec("tensorflow_addons") is None:
        raise _not_installed("tensorflow_addons is not installed")
    preset = "TF_USE_LEGACY_KERAS" in os.environ
    os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
    import tensorflow as tf

    if not tf.keras.Model.__module__.startswith("tf_keras"):
        if not preset:
            del os.environ["TF_USE_LEGACY_KERAS"]
        raise ImportError(
            "tensorflow_addons needs Keras 2 (tf_keras) as `tf.keras`, but it is Keras 3. Set "
            "TF_USE_LEGACY_KERAS=1 in the environment, or call "
            "tf_redsync.addons.load() before the first use of `tf.keras`."
        )
    try:
        with _keras_2_names():
            return importlib.import_module("tensorflow_addons")
    except ModuleNotFoundError as error:
        raise _not_installed(str(error)) from error


def _not_installed(reason: str) -> ImportError:
    return ImportError(
        f"{reason}. Install the packages of TensorFlow Addons: pip install 'tf_redsync[addons]'"
    )


@contextlib.contextmanager
def _keras_2_names() -> Iterator[None]:
    """Context in which `keras.src.<name>` is an alias of `tf_keras.src.<name>`."""
    importlib.import_module("keras")  # Keras 3 must not be imported while the aliases are in place
    wanted = {f"keras.src.{n}": importlib.import_module(f"tf_keras.src.{n}") for n in _ALIASED}
    saved = {name: sys.modules.get(name) for name in wanted}
    sys.modules.update(wanted)
    # `from keras.src import backend` reads the attribute before `sys.modules`.
    source = importlib.import_module("keras.src")
    top = [name for name in _ALIASED if "." not in name]
    attributes = {name: vars(source).get(name) for name in top}
    for name in top:
        setattr(source, name, wanted[f"keras.src.{name}"])
    # The search path of `import tensorflow.keras`. If TensorFlow was imported without
    # TF_USE_LEGACY_KERAS=1, the path leads to Keras 3.
    tensorflow = importlib.import_module("tensorflow")
    path = list(tensorflow.__path__)
    keras_2 = importlib.import_module("tf_keras.api._v2")
    tensorflow.__path__.insert(0, os.path.dirname(str(keras_2.__file__)))
    try:
        yield
    finally:
        tensorflow.__path__[:] = path
        for name, value in attributes.items():
            if value is None:
                delattr(source, name)
            else:
                setattr(source, name, value)
        for name, module in saved.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
