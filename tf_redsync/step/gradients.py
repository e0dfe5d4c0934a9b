"""Gradients as the optimizer gets them, and as they go to the exchange."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_redsync.exchange.layout import GRADIENT_DTYPES, TensorSpec
from tf_redsync.ops.words import before_cast


def dense(
    grads: Sequence[tf.Tensor | tf.IndexedSlices], specs: Sequence[TensorSpec]
) -> list[tf.Tensor]:
    """Return gradients as dense tensors, float32, or bfloat16 where they were computed in it.

    Args:
        grads: Gradients.
        specs: Their variables.

    Raises:
        TypeError: for a gradient that is not float32, bfloat16 or float16.
    """
    return [_dense(grad, spec) for grad, spec in zip(grads, specs, strict=True)]


def _dense(grad: tf.Tensor | tf.IndexedSlices, spec: TensorSpec) -> tf.Tensor:
    if grad.dtype not in GRADIENT_DTYPES:
        raise TypeError(
            f"the gradient of {spec.name!r} must be float32, bfloat16 or float16. "
            f"Received: dtype={grad.dtype.name}. Build the model in one of these dtypes."
        )
    if isinstance(grad, tf.IndexedSlices):
        # An embedding's. The residual is dense, so duplicates are summed here, in float32.
        rows = tf.cast(grad.values, tf.float32)
        grad = tf.IndexedSlices(rows, grad.indices, grad.dense_shape)
    tensor = before_cast(tf.convert_to_tensor(grad))
    if tensor.dtype != tf.bfloat16:
        tensor = tf.cast(tensor, tf.float32)
    return tf.ensure_shape(tensor, spec.shape)
