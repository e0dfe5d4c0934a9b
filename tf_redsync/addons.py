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

    Addons looks for Keras 2 under `keras.src`, where Keras 3 lives now. Keras 2 is still there as
    `tf_keras`; while Addons is imported, and only then, the few names that it asks for lead to it.
    `tf.keras` must be Keras 2, so call this before anything uses `tf.keras`, or start the program
    with TF_USE_LEGACY_KERAS=1.

    Returns:
        The module `tensorflow_addons`. Its optimizers are wrapped like any other:
        `DistributedOptimizer(load().optimizers.LAMB(0.01), method)`.

    Raises:
        ImportError: when `tensorflow-addons` or `tf_keras` is not installed, or when `tf.keras` is
            already bound to Keras 3.

    Example:
        tfa = tf_redsync.addons.load()
        optimizer = tf_redsync.DistributedOptimizer(tfa.optimizers.LAMB(0.01), method)
    """
    if "tensorflow_addons" in sys.modules:
        return sys.modules["tensorflow_addons"]
    os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
    import tensorflow as tf

    if importlib.util.find_spec("tf_keras") is None:
        raise requirements.no_tf_keras()
    if not tf.keras.Model.__module__.startswith("tf_keras"):
        raise ImportError(
            "tensorflow_addons needs Keras 2 (tf_keras) as `tf.keras`, but it is Keras 3. Set "
            "TF_USE_LEGACY_KERAS=1 in the environment, or call "
            "tf_redsync.addons.load() before the first use of `tf.keras`."
        )
    try:
        with _keras_2_names():
            return importlib.import_module("tensorflow_addons")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{error}. Install what TensorFlow Addons needs: pip install 'tf_redsync[addons]'"
        ) from error


@contextlib.contextmanager
def _keras_2_names() -> Iterator[None]:
    """Let `keras.src.<name>` mean `tf_keras.src.<name>` inside the block."""
    importlib.import_module("keras")  # Keras 3 must not be imported while its names are others'
    wanted = {f"keras.src.{n}": importlib.import_module(f"tf_keras.src.{n}") for n in _ALIASED}
    saved = {name: sys.modules.get(name) for name in wanted}
    sys.modules.update(wanted)
    # `from keras.src import backend` looks for an attribute first.
    source = importlib.import_module("keras.src")
    top = [name for name in _ALIASED if "." not in name]
    attributes = {name: vars(source).get(name) for name in top}
    for name in top:
        setattr(source, name, wanted[f"keras.src.{name}"])
    # Where `import tensorflow.keras` looks. If TensorFlow was imported without
    # TF_USE_LEGACY_KERAS=1, it would find Keras 3.
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
