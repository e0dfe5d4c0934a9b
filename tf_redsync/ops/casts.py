"""Casts that need not be made: ops that widen bfloat16 themselves read what was cast.

A model in mixed precision computes its gradients in bfloat16 and casts each to its variable's
float32. Such a cast writes and reads 8 bytes of an element that an op needs 2 of. In a graph it is
left out, unless something else needs its result.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


def before_cast(tensor: tf.Tensor) -> tf.Tensor:
    """Return the bfloat16 tensor that a float32 one was cast from, where that is known.

    Args:
        tensor: In a graph the result of a cast, perhaps.

    Returns:
        What was cast from bfloat16 to float32, which changes no value; else `tensor` itself.
    """
    if not tf.is_symbolic_tensor(tensor) or tensor.dtype != tf.float32:
        return tensor
    op = tensor.op
    was_narrow = op.type == "Cast" and op.inputs[0].dtype == tf.bfloat16
    return op.inputs[0] if was_narrow else tensor


def widened(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return tensors as float32; see `before_cast` for who does not need that."""
    return [tf.cast(t, tf.float32) for t in tensors]
