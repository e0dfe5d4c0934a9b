"""Pure-TensorFlow reference of top-k in every chunk: equal bits. See `chunks.py`."""

from __future__ import annotations

import tensorflow as tf


def chunked_top_k(chunks: tf.Tensor, k: int) -> tuple[tf.Tensor, tf.Tensor]:
    """See `tf_redsync.ops.chunks.chunked_top_k`; all arguments are given and already checked."""
    # As integers magnitudes sort like the floats, NaNs and denormals too, whatever the device does.
    magnitudes = tf.bitwise.bitwise_and(tf.bitcast(chunks, tf.int32), 0x7FFFFFFF)
    _, positions = tf.math.top_k(magnitudes, k, sorted=True)
    positions = tf.sort(positions, axis=1)
    return positions, tf.gather(chunks, positions, batch_dims=1)
