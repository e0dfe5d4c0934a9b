"""Several tensors as the rows of one matrix, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def count(tensors: Sequence[tf.Tensor]) -> Any:
    """Return the number of all elements: an int if it is static, else an int64 scalar."""
    return sum(map(_size, tensors))


def dimension(tensor: tf.Tensor, axis: int) -> Any:
    """Return the length of an axis: an int if it is static, else an int64 scalar."""
    static = tensor.shape[axis]
    return tf.shape(tensor, tf.int64)[axis] if static is None else static


def length(elements: Any, rows: Any, unit: int) -> Any:
    """Return the length of `rows` equal rows for all elements, a multiple of `unit`."""
    return unit * -(-elements // (unit * rows))


def added(tensors: Sequence[tf.Tensor], others: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return the sums of the tensors of two lists; `tensors` if the other list is empty."""
    if not others:
        return list(tensors)
    return [a + b for a, b in zip(tensors, others, strict=True)]


def from_tensors(tensors: Sequence[tf.Tensor], rows: Any, unit: int) -> tf.Tensor:
    """Concatenate tensors, add zeros, and cut: `[rows, length]`, see `length`."""
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
    """Return rows, of which number `row` is the only row of `new`."""
    new = new[: dimension(table, 1)]  # none without columns: a scatter would fail
    # Unlike `tf.where`, this can write into `table`
    return tf.tensor_scatter_nd_update(table, tf.fill([dimension(new, 0), 1], row), new)


def _size(tensor: tf.Tensor) -> Any:
    size = tensor.shape.num_elements()
    return tf.size(tensor, tf.int64) if size is None else size
