"""Tensors as matrices, and matrices as products of two factors."""

from __future__ import annotations

import math

import tensorflow as tf

from tf_redsync.exchange.layout import BucketLayout, TensorSpec

Factors = list[tf.Tensor]


def matrix_shape(spec: TensorSpec) -> tuple[int, int]:
    """Rows and columns of a tensor as a matrix: all axes but the last, and the last.

    In Keras the last axis of a kernel is that of its outputs.
    """
    return math.prod(spec.shape[:-1]), (spec.shape[-1] if spec.shape else 1)


def orthogonal(factor: tf.Tensor) -> tf.Tensor:
    """Return an orthonormal basis of the columns of `factor` `[rows, r]`, of the same shape."""
    return tf.linalg.qr(factor).q


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
