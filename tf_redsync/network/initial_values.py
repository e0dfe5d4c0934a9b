"""Initial values of variables: whether the chief broadcasts them, and in which dtype.

Private name of TensorFlow used here: `_get_variable_creator_initial_value` of `extended`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from tf_redsync.network.dtypes import CARRIED

_LARGE = 2**20  # bytes whose broadcast takes longer than a comparison, except on fast networks
_MOST = 2**30  # bytes of a broadcast; a message over gRPC must have fewer than 2 GiB
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


class _Comparison:
    """Comparison of large initial values: equal ones, such as of equal seeds, need no broadcast.

    It ends with the first difference, because random values of different seeds all differ.

    Args:
        gather: Returns the texts of all workers for an action and this worker's text.
    """

    def __init__(self, gather: Callable[[str, str], Sequence[str]]):
        self._gather = gather
        self._worthwhile = True

    def equal(self, value: tf.Tensor) -> bool:
        """Return whether a large value is bit-equal on all workers, which must all call it."""
        size = value.dtype.size * value.shape.num_elements()
        if not self._worthwhile or size < _LARGE or not hasattr(value, "numpy"):
            return False
        content = np.ascontiguousarray(value.numpy()).view(np.uint8).data
        action = f"compare an initial value of shape {value.shape}"
        texts = self._gather(action, hashlib.sha256(content).hexdigest())
        self._worthwhile = len(set(texts)) == 1
        return self._worthwhile


def install(strategy: tf.distribute.Strategy, gather: Callable[[str, str], Sequence[str]]) -> None:
    """Make the strategy's variables respect `own`, and allow all dtypes, such as bfloat16.

    A value whose dtype TensorFlow cannot broadcast is sent in a dtype that represents all values,
    a complex one as two parts, and a very large one in slices along its first axis.

    Args:
        strategy: The strategy.
        gather: Returns the texts of all workers for an action and this worker's text. It compares
            large values, which are broadcast only if they differ.
    """
    comparison = _Comparison(gather)
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
            if comparison.equal(value):
                return value
            return _of_chief(value, send)

        def send(value: tf.Tensor) -> tf.Tensor:
            carried = {**kwargs, "initial_value": value, "dtype": value.dtype}
            return broadcast(replica_id, device, primary_var, **carried)()

        return initial_value

    extended._get_variable_creator_initial_value = initial_value_of


def _of_chief(value: tf.Tensor, send: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """Return the chief's value; `send` broadcasts what TensorFlow can broadcast."""
    if value.dtype.is_complex:
        parts = tf.math.real(value), tf.math.imag(value)
        return tf.complex(*(_of_chief(part, send) for part in parts))
    carrier = CARRIED.get(value.dtype, value.dtype)
    size = carrier.size * value.shape.num_elements()
    if size > _MOST and value.shape[0] > 1:
        rows = max(1, value.shape[0] * _MOST // size)
        starts = range(0, value.shape[0], rows)
        return tf.concat([_of_chief(value[i : i + rows], send) for i in starts], axis=0)
    return tf.cast(send(tf.cast(value, carrier)), value.dtype)


def _is_zero(value: tf.Tensor) -> bool:
    """Return whether all elements are known to be zero."""
    known = tf.get_static_value(value)
    return known is not None and not known.any()
