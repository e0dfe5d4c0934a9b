"""AutoGraph calls this package's functions as they are, as it does those of TensorFlow and Keras.

AutoGraph rewrites what a `tf.function` of the user calls, unless a rule names its module. Rewriting
this package would take more than a second of the first step and change nothing.

The user's own functions still need AutoGraph. A function that calls one passes it through
`as_called` first, as `Strategy.run` of TensorFlow does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import config as _config


def leave_alone(package: str) -> None:
    """Add a rule for all modules of `package`; idempotent."""
    names = [str(rule) for rule in _config.CONVERSION_RULES]
    rule = _config.DoNotConvert(package)
    if str(rule) not in names:
        _config.CONVERSION_RULES = (rule, *_config.CONVERSION_RULES)


def as_called(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, converted when it is called if AutoGraph is on here."""
    status = tf.__internal__.autograph.control_status_ctx()
    converted: Callable[..., Any] = tf.__internal__.autograph.tf_convert(
        function, status, convert_by_default=False
    )
    return converted


leave_alone("tf_redsync")
