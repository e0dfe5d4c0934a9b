"""Initial values of variables: whether the chief broadcasts them, and in which dtype.

Private name of TensorFlow used here: `_get_variable_creator_initial_value` of `extended`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tf_redsync.network.dtypes import CARRIED

_own: list[bool] = []  # `only_zeros` of the entered `own` contexts


@contextmanager
def own(only_zeros: bool = False) -> Iterator[None]:
    """Context in which variables start with each worker's own initial value.

    By default `tf.distribute` broadcasts each value. For a residual's zeros, the broadcast would
    take as long as for the weights.

    Args:
        only_zeros: Whether to broadcast values that are not all zero. All workers must have zeros
            for the same variables.
    """
    _own.append(only_zeros)
    try:
        yield
    finally:
        _own.pop()


def install(strategy: tf.distribute.Strategy) -> None:
    """Make the strategy's variables respect `own`, and allow all dtypes, such as bfloat16.

    A value whose dtype TensorFlow cannot broadcast is sent in a dtype that represents all values.
    """
    extended = strategy.extended
    broadcast = extended._get_variable_creator_initial_value

    def initial_value_of(replica_id: int, device: Any, primary_var: Any, **kwargs: Any) -> Any:
        if replica_id > 0:
            return broadcast(replica_id, device, primary_var, **kwargs)

        def initial_value() -> tf.Tensor:
            value = kwargs["initial_value"]
            value = value() if callable(value) else value
            value = getattr(value, "wrapped_value", value)  # a value from a checkpoint is wrapped
            value = tf.convert_to_tensor(value, kwargs.get("dtype"))
            if (_own and (not _own[-1] or _is_zero(value))) or value.shape.num_elements() == 0:
                return value  # TensorFlow may crash when it broadcasts an empty tensor
            carrier = CARRIED.get(value.dtype, value.dtype)
            carried = {**kwargs, "initial_value": tf.cast(value, carrier), "dtype": carrier}
            received = broadcast(replica_id, device, primary_var, **carried)()
            return tf.cast(received, value.dtype)

        return initial_value

    extended._get_variable_creator_initial_value = initial_value_of


def _is_zero(value: tf.Tensor) -> bool:
    """Return whether all elements are known to be zero."""
    known = tf.get_static_value(value)
    return known is not None and not known.any()
