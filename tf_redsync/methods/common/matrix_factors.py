"""Tensors as matrices, and matrices as products of two factors."""

from __future__ import annotations

import math

import tensorflow as tf

from tf_redsync.exchange.layout import BucketLayout, TensorSpec

Factors = list[tf.Tensor]


def matrix_shape(spec: TensorSpec) -> tuple[int, int]:
    """Rows and columns of a tensor as a matrix: its first axes, and the others.

    Of all splits of the axes the one with the smallest sum of rows and columns, since that is what
    factors of a rank cost; of equal ones the last.
    """
    shape = spec.shape
    if len(shape) < 2:
        return 1, spec.size
    ends = range(len(shape) - 1, 0, -1)
    return min(((math.prod(shape[:i]), math.prod(shape[i:])) for i in ends), key=sum)


def orthogonal(factor: tf.Tensor) -> tf.Tensor:
    """Return an orthonormal basis of the columns of `factor` `[rows, r]`, of the same shape."""
    return tf.linalg.qr(factor).q


def of_unit_length(factor: tf.Tensor) -> tf.Tensor:
    """Return `factor` `[rows, r]` with columns of length 1; a column of zeros stays."""
    largest = tf.reduce_max(tf.abs(factor), axis=0)  # or the squares would overflow
    scaled = tf.math.divide_no_nan(factor, largest)
    return tf.math.divide_no_nan(scaled, tf.norm(scaled, axis=0))


def as_matrices(layout: BucketLayout, grads: Factors, residuals: Factors) -> list[tf.Tensor]:
    """Return `grads + residuals` as matrices."""
    return [
        tf.reshape(g + e, matrix_shape(s))
        for s, g, e in zip(layout.specs, grads, residuals, strict=True)
    ]


def as_tensors(layout: BucketLayout, matrices: Factors) -> list[tf.Tensor]:
    """Undo `as_matrices`."""
    return [tf.reshape(m, s.shape) for s, m in zip(layout.specs, matrices, strict=True)]


def products(p: Factors, q: Factors) -> list[tf.Tensor]:
    """Return `P Q^T` of every pair of factors."""
    return [tf.matmul(a, b, transpose_b=True) for a, b in zip(p, q, strict=True)]


def differences(a: list[tf.Tensor], b: list[tf.Tensor]) -> list[tf.Tensor]:
    """Return `a - b` of every pair."""
    return [x - y for x, y in zip(a, b, strict=True)]


def unflat(vector: tf.Tensor, like: Factors) -> Factors:
    """Return the factors, of the shapes of `like`, whose elements are in `vector`."""
    sizes = [f.shape.num_elements() for f in like]
    return [tf.reshape(v, f.shape) for v, f in zip(tf.split(vector, sizes), like, strict=True)]
