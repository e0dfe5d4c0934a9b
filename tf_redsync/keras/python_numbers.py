"""Python numbers of distributed scalars of Keras 3, such as `float(optimizer.learning_rate)`.

Under a strategy the value of a Keras variable is a distributed variable, which TensorFlow does not
convert to `float` and `int`.

Names of Keras used here, all public: `__float__` and `__int__` of `Variable`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_redsync.patching import patch_once


def install() -> None:
    """Convert the value of this process; a second call is a no-op."""
    for name, kind in (("__float__", float), ("__int__", int)):
        patch_once(keras.Variable, name, functools.partial(_converting, kind))


def _converting(kind: type, convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def converted(self: Any) -> Any:
        if self.ndim == 0 and isinstance(self.value, tf.distribute.DistributedValues):
            return kind(tf.convert_to_tensor(self.value))
        return convert(self)

    return converted
