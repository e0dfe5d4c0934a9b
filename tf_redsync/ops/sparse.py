"""Sparse totals, and updates of only the elements at their positions.

At a density of 0.1 % a dense total is almost all zeros. Some optimizers, such as plain SGD, are
linear in the gradient and do not change elements with a zero gradient. Their update can be applied
at the received positions, without a dense total.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import tensorflow as tf

from tf_redsync.ops import native, rows
from tf_redsync.ops.message_layout import unsigned
from tf_redsync.ops.native import runs_natively


class SparseTotal(NamedTuple):
    """A sum over workers as positions and values.

    Attributes:
        indices: float32 `[workers, entries]`, the bits of unsigned positions in the flattened
            tensor. They may repeat. They are not int32, which conditionals would move from a GPU
            to host memory.
        values: float32 `[workers, entries]`, summed per position; 0 in unused entries.
    """

    indices: tf.Tensor
    values: tf.Tensor


class EitherTotal(NamedTuple):
    """A sum over workers that is dense in some steps and sparse in others.

    Attributes:
        dense: float32, of the tensor's shape if the total is dense, else empty.
        sparse: The sparse total; empty if it is dense.
        is_dense: Bool scalar tensor, equal on all workers.
    """

    dense: tf.Tensor
    sparse: SparseTotal
    is_dense: tf.Tensor


def descend(
    variable: tf.Variable, total: SparseTotal | tf.Tensor, learning_rate: tf.Tensor
) -> tf.Operation:
    """Apply `variable -= learning_rate * total`, for a sparse total only at its positions.

    Entries are applied row by row in their order, so equal messages give equal bits on all workers.
    Only on a GPU without native kernels is there no order; if a worker has one, all totals of all
    workers are dense.

    Args:
        variable: float32 variable of any shape.
        total: The direction, dense in the variable's shape, or with positions in the flattened
            variable.
        learning_rate: Scalar.
    """
    rate = tf.cast(learning_rate, tf.float32)
    if not isinstance(total, SparseTotal):
        return tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=total)
    if runs_natively([variable]):
        return native.load().redsync_descend(
            variable=variable.handle,
            indices=total.indices,
            values=total.values,
            learning_rate=rate,
        )
    if variable.shape.rank == 0:  # a scatter cannot name its element
        result = descended(variable.read_value(), total, rate)
        return tf.raw_ops.AssignVariableOp(resource=variable.handle, value=result)
    return tf.raw_ops.ResourceScatterNdSub(
        ref=variable.handle,
        indices=_unravel(total.indices, variable.shape),
        updates=rate * total.values,
        use_locking=True,
    )


def descended(start: tf.Tensor, total: SparseTotal, learning_rate: float | tf.Tensor) -> tf.Tensor:
    """Return `start - learning_rate * total`; `descend` for a tensor.

    Args:
        start: float32 tensor of any shape. The result reuses its buffer if no other op needs it.
        total: The direction; positions refer to the flattened tensor.
        learning_rate: A number, or a float32 scalar.
    """
    rate = tf.convert_to_tensor(learning_rate, tf.float32)
    if runs_natively([start]):
        result: tf.Tensor = native.load().redsync_descended(
            start=start, indices=total.indices, values=total.values, learning_rate=rate
        )
        return result
    positions = unsigned(total.indices)[..., tf.newaxis]
    vector = tf.reshape(start, [-1])
    vector = tf.tensor_scatter_nd_sub(vector, positions, rate * total.values)
    return rows.in_shape_of(start, vector)


def _unravel(indices: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    """Return flat indices as int64 coordinates `[..., rank]`; invalid ones stay out of range."""
    positions, columns = unsigned(indices), []
    for axis in range(shape.rank):
        stride = math.prod(shape[axis + 1 :])
        columns.append(positions // stride)
        positions = positions % stride
    return tf.stack(columns, axis=-1)
