"""Top-k in every chunk of a tensor: exact, in one pass, without a search for a threshold."""

from __future__ import annotations

import tensorflow as tf

from tf_redsync.ops.codec_checks import check_ints
from tf_redsync.ops.reference import chunks as reference


def chunked_top_k(chunks: tf.Tensor, k: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the `k` elements of the largest magnitude in every chunk, by position.

    Magnitudes compare as the bits of their floats, so NaNs are the largest and denormals count;
    among equals the lower position comes first.

    Args:
        chunks: float32 `[chunks, size]`.
        k: In [0, size].

    Returns:
        Positions in the chunk, ascending, int32 `[chunks, k]`; and the elements there, float32.

    Raises:
        ValueError: for `k` out of range.
        TypeError: for a dtype other than float32.

    Example:
        >>> positions, values = chunked_top_k(tf.constant([[1.0, -3.0, 0.5, 3.0]]), 2)
        >>> positions.numpy(), values.numpy()
        (array([[1, 3]], dtype=int32), array([[-3.,  3.]], dtype=float32))
    """
    chunks = tf.convert_to_tensor(chunks)
    if chunks.dtype != tf.float32:
        raise TypeError(f"`chunks` must be float32. Received: {chunks.dtype.name}.")
    check_ints("k", [k], 0, chunks.shape[1])
    return reference.chunked_top_k(chunks, k)
