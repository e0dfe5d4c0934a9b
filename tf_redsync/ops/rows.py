"""Conversion of several tensors to rows of equal length in one matrix, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def count(tensors: Sequence[tf.Tensor]) -> Any:
    """Return the number of elements of all tensors: an int if static, else an int64 scalar."""
    return sum(map(_size, tensors))


def dimension(tensor: tf.Tensor, axis: int) -> Any:
    """Return the length of an axis: an int if it is static, else an int64 scalar."""
    static = tensor.shape[axis]
    return tf.shape(tensor, tf.int64)[axis] if static is None else static


def length(elements: Any, rows: Any, unit: int) -> Any:
    """Return the smallest length, a multiple of `unit`, of `rows` rows that hold `elements`."""
    return unit * -(-elements // (unit * rows))


def added(tensors: Sequence[tf.Tensor], others: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return the elementwise sums of two lists of tensors; `tensors` if `others` is empty."""
    if not others:
        return list(tensors)
    return [a + b for a, b in zip(tensors, others, strict=True)]


def from_tensors(tensors: Sequence[tf.Tensor], rows: Any, unit: int) -> tf.Tensor:
    """Return the flattened tensors, concatenated, padded with zeros and cut: `[rows, length]`."""
    elements = count(tensors)
    columns = length(elements, rows, unit)
    padding = tf.zeros([rows * columns - elements])
    flat = [tf.reshape(t, [-1]) for t in tensors]
    return tf.reshape(tf.concat([*flat, padding], 0), [rows, columns])


def to_tensors(rows: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return the first elements of `rows` as tensors in the shapes of `like`."""
    vector = tf.reshape(rows, [-1])[: count(like)]
    parts = tf.split(vector, [_size(t) for t in like], num=len(like))
    return [in_shape_of(t, part) for part, t in zip(parts, like, strict=True)]


def in_shape_of(like: tf.Tensor, vector: tf.Tensor) -> tf.Tensor:
    """Return the elements of a vector in the shape of `like`."""
    shape = like.shape if like.shape.is_fully_defined() else tf.shape(like, tf.int64)
    return tf.ensure_shape(tf.reshape(vector, shape), like.shape)


def replaced(table: tf.Tensor, row: tf.Tensor, new: tf.Tensor) -> tf.Tensor:
    """Return `table` `[rows, n]` with row number `row`, a scalar, replaced by `new` `[1, n]`."""
    new = new[: dimension(table, 1)]  # no row if n is 0, for which a scatter fails
    # Unlike `tf.where`, a scatter can reuse the memory of `table`.
    return tf.tensor_scatter_nd_update(table, tf.fill([dimension(new, 0), 1], row), new)


def _size(tensor: tf.Tensor) -> Any:
    size = tensor.shape.num_elements()
    return tf.size(tensor, tf.int64) if size is None else size
