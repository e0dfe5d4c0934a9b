"""Adafactor's factored second moment, kept above zero.

With R the means of g^2 + epsilon_1 over rows and C those over columns, Keras 3 and tf_keras compute

    v = (R / mean(R)) C,  update = g / sqrt(v)

Where a row and a column have held nothing but zeros, R and C are epsilon_1 = 1e-30, v is
1e-60 / mean(R), which is 0 in float32, and the update is 0 / 0. A plain Adafactor does that for an
input that is always 0 and a unit that is never active; of a sparse total it is most of a matrix.

Here v is at least the smallest normal number of float32, so that the update is the formula's 0.
Every v that does not underflow is what it was.

Private names used here: the inner optimizer's list `_v`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_redsync.keras import conflicts

_SMALLEST = 2.0**-126  # below it, TensorFlow's kernels flush to 0


def keep_positive(inner: Any) -> None:
    """Let a built optimizer never set the second moments of a matrix to 0.

    Args:
        inner: An optimizer that is built; nothing is done if it is no Adafactor.
    """
    adafactor = conflicts.innermost(inner)
    if type(adafactor).__name__ != "Adafactor":
        return
    for moment in adafactor._v:
        variable = moment if isinstance(moment, tf.Variable) else getattr(moment, "value", None)
        if variable is not None and len(variable.shape) > 1:
            variable.assign = _at_least_smallest(variable.assign)


def _at_least_smallest(assign: Callable[..., Any]) -> Callable[..., Any]:
    def assign_raised(value: Any, *args: Any, **kwargs: Any) -> Any:
        value = tf.convert_to_tensor(value)
        return assign(tf.maximum(value, tf.cast(_SMALLEST, value.dtype)), *args, **kwargs)

    return assign_raised
