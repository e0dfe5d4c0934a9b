"""Numbers of 16 bits, two in a word.

A row of n elements, n even, becomes a message of int32 words: [flag] [n / 2 words, the first number
of each low].
"""

from __future__ import annotations

import tensorflow as tf

from tf_redsync.ops import native
from tf_redsync.ops.reference import halves as reference


def half_encode(rows: tf.Tensor, dtype: tf.DType) -> tuple[tf.Tensor, tf.Tensor]:
    """Round rows to 16 bits, half to even; return their messages and errors.

    Args:
        rows: float32 `[rows, n]`, n even.
        dtype: `tf.float16` or `tf.bfloat16`.

    Returns:
        Messages, int32 `[rows, 1 + n / 2]`, and errors, `rows - decoded`, float32 `[rows, n]`. All
        messages are zero, and errors unspecified, unless all rounded elements are finite.

    Example:
        >>> messages, errors = half_encode(tf.constant([[1.0, 2049.0]]), tf.float16)
        >>> half_decode(messages, tf.float16).numpy(), errors.numpy()
        (array([[1.000e+00, 2.048e+03]], dtype=float32), array([[0., 1.]], dtype=float32))
    """
    if native.runs_natively([rows]) and native.are_on_cpus([rows]):
        return tuple(native.load().redsync_half_encode(values=rows, dtype=dtype))
    return reference.half_encode(rows, dtype)


def half_decode(messages: tf.Tensor, dtype: tf.DType, *, add: bool = False) -> tf.Tensor:
    """Decode messages of `half_encode`; a message of zeros stands for zeros.

    Args:
        messages: int32 `[rows, words]`.
        dtype: As given to `half_encode`.
        add: Whether the rows are added up, in their order.

    Returns:
        float32 `[rows, n]`, or `[n]` if they are added up.
    """
    if native.runs_natively([messages]) and native.are_on_cpus([messages]):
        values: tf.Tensor = native.load().redsync_half_decode(
            messages=messages, dtype=dtype, sum=add
        )
        return values
    return reference.half_decode(messages, dtype, add=add)
