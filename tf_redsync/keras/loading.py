"""The optimizer of a model that Keras loads, perhaps outside of the strategy's scope.

Keras builds the optimizer of a model that it loads, although the program may only want to predict.

Names of Keras used here, all public: the function `load_model`, and `compile_from_config` of
`Model`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import tensorflow as tf

from tf_redsync.keras import slots
from tf_redsync.step import workers

_REBUILDS = ("load_model", "compile_from_config")


def may_train(variables: Sequence[Any]) -> bool:
    """Check, before an optimizer makes its first variable, that the workers train together.

    Args:
        variables: The model's, which the optimizer is built with.

    Returns:
        Whether they do. `False` while Keras loads a model outside of the strategy's scope: it may
        predict, and its first training step raises.

    Raises:
        ValueError: outside of the strategy's scope, while no model is loaded.
    """
    try:
        workers.check_together(tf.distribute.get_strategy())
        workers.check_in_scope([slots.tf_variable(v) for v in variables])
    except ValueError:
        if not in_progress():
            raise
        return False
    return True


def in_progress() -> bool:
    """Return whether Keras loads or rebuilds the model whose optimizer it asks for something."""
    return any(name in _REBUILDS for name in keras_functions())


def keras_functions() -> Iterator[str]:
    """Yield the names of the functions of Keras that run in this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # Not by its `self`: `f_locals` would keep the frame's values alive, iterators among them.
        if frame.f_globals.get("__name__", "").partition(".")[0] in ("keras", "tf_keras"):
            yield frame.f_code.co_name
        frame = frame.f_back
