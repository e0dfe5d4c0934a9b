"""Adapters between an exchange and the three families of Keras optimizers."""

import importlib
import importlib.util
import sys

from tf_redsync import requirements


def patch_tf_keras() -> None:
    """Patch the models of tf_keras if the process uses it.

    Python looks up `compile` in `model.compile(DistributedOptimizer(...))` before it creates the
    wrapper, so creating a wrapper would patch `compile` too late.
    """
    loaded = sys.modules.get("tf_keras") is not None
    if loaded or (requirements.wants_legacy_keras() and importlib.util.find_spec("tf_keras")):
        importlib.import_module("tf_redsync.keras.tf_keras")
