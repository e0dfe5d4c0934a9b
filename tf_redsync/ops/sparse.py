"""Totals in coordinate form, and an update that touches nothing else.

At a density of 0.1 % the dense total is almost all zeros. Where the optimizer's rule is linear in
the gradient and leaves an element with a zero gradient as it is, as plain SGD does, the update can
be applied at the received coordinates, without ever making the total dense.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import tensorflow as tf

from tf_redsync.ops import native
from tf_redsync.ops.message_layout import unsigned
from tf_redsync.ops.native import runs_natively


class SparseTotal(NamedTuple):
    """A sum over workers in coordinate form.

    Attributes:
        indices: `[entries]`, the bits of unsigned positions in the flattened tensor; as float32,
            since GPUs have int32 in the host's memory where a step has conditions. They may repeat.
        values: float32 `[entries]`, to be added up per position; 0 in unused entries.
    """

    indices: tf.Tensor
    values: tf.Tensor


class EitherTotal(NamedTuple):
    """A sum over workers that is dense in some steps and in coordinate form in others.

    Attributes:
        dense: float32, of the tensor's shape where it is dense, else empty.
        coordinates: Empty where the total is dense.
        is_dense: Bool scalar tensor, equal on all workers.
    """

    dense: tf.Tensor
    coordinates: SparseTotal
    is_dense: tf.Tensor


def descend(variable: tf.Variable, total: SparseTotal, learning_rate: tf.Tensor) -> tf.Operation:
    """Apply `variable -= learning_rate * total` at the total's coordinates.

    Entries are applied in their order, so equal messages give equal bits on all workers.

    Args:
        variable: float32 variable of any shape.
        total: What to descend along; positions refer to the flattened variable.
        learning_rate: Scalar.
    """
    rate, indices = tf.cast(learning_rate, tf.float32), tf.bitcast(total.indices, tf.int32)
    if runs_natively([variable]):
        return native.load().redsync_descend(
            variable=variable.handle,
            indices=indices,
            values=total.values,
            learning_rate=rate,
        )
    return tf.raw_ops.ResourceScatterNdSub(
        ref=variable.handle,
        indices=_unravel(indices, variable.shape),
        updates=rate * total.values,
        use_locking=True,
    )


def _unravel(positions: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    """Positions in the flattened tensor as int64 `[entries, rank]`; bad ones stay out of range."""
    positions, columns = unsigned(positions), []
    for axis in range(shape.rank):
        stride = math.prod(shape[axis + 1 :])
        columns.append(positions // stride)
        positions = positions % stride
    return tf.stack(columns, axis=1)
