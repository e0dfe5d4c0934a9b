"""Several tensors as the rows of one matrix, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def count(tensors: Sequence[tf.Tensor]) -> Any:
    """Return the number of all elements: an int if it is static, else an int64 scalar."""
    sizes = [t.shape.num_elements() for t in tensors]
    return sum(
        tf.size(t, tf.int64) if size is None else size
        for t, size in zip(tensors, sizes, strict=True)
    )


def length(elements: Any, rows: int, unit: int) -> Any:
    """Return the length of `rows` equal rows for all elements, a multiple of `unit`."""
    return unit * -(-elements // (unit * rows))


def added(tensors: Sequence[tf.Tensor], others: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return the sums of the tensors of two lists; `tensors` if the other list is empty."""
    if not others:
        return list(tensors)
    return [a + b for a, b in zip(tensors, others, strict=True)]


def from_tensors(tensors: Sequence[tf.Tensor], rows: int, unit: int) -> tf.Tensor:
    """Concatenate tensors, add zeros, and cut: `[rows, length]`, see `length`."""
    elements = count(tensors)
    columns = length(elements, rows, unit)
    padding = tf.zeros([rows * columns - elements])
    flat = [tf.reshape(t, [-1]) for t in tensors]
    return tf.reshape(tf.concat([*flat, padding], 0), [rows, columns])


def to_tensors(rows: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return the first elements of `rows` as tensors in the shapes of `like`."""
    sizes = [tf.size(t) for t in like]
    vector = tf.reshape(rows, [-1])[: tf.add_n(sizes)]
    parts = tf.split(vector, tf.stack(sizes), num=len(like))
    return [
        tf.ensure_shape(tf.reshape(p, tf.shape(t)), t.shape)
        for p, t in zip(parts, like, strict=True)
    ]
