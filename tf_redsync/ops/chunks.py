"""Top-k in every chunk of a tensor: exact, in one pass over it."""

from __future__ import annotations

import tensorflow as tf

from tf_redsync.ops import native
from tf_redsync.ops.codec_checks import check_ints
from tf_redsync.ops.native import runs_natively
from tf_redsync.ops.reference import chunks as reference


def chunked_top_k(chunks: tf.Tensor, k: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the `k` elements of the largest magnitude in every chunk, by position.

    Magnitudes compare as the bits of their floats, so NaNs are the largest and denormals count;
    among equals the lower position comes first.

    Args:
        chunks: float32 `[chunks, size]`, of a static size.
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
    if chunks.shape.rank != 2 or chunks.shape[1] is None:
        raise ValueError(
            "`chunks` must have shape [chunks, size], of a static size. Received: "
            f"shape {chunks.shape}."
        )
    check_ints("k", [k], 0, chunks.shape[1])
    if runs_natively([chunks]):
        return tuple(native.load().redsync_chunked_top_k(chunks=chunks, k=k))
    return reference.chunked_top_k(chunks, k)
