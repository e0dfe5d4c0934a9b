"""Pure-TensorFlow reference of `ops/halves.py`."""

from __future__ import annotations

import functools

import tensorflow as tf

from tf_redsync.ops import wire


def half_encode(rows: tf.Tensor, dtype: tf.DType) -> tuple[tf.Tensor, tf.Tensor]:
    """See `tf_redsync.ops.halves.half_encode`."""
    halves = tf.cast(rows, dtype)
    pairs = tf.reshape(halves, [rows.shape[0], -1, 2])
    finite = tf.reduce_all(tf.math.is_finite(halves))
    flags = tf.ones([rows.shape[0], 1], tf.int32)
    message = wire.joined(flags, tf.bitcast(pairs, tf.int32), axis=1)
    return wire.zero_unless(finite, message), rows - tf.cast(halves, tf.float32)


def half_decode(messages: tf.Tensor, dtype: tf.DType, *, add: bool) -> tf.Tensor:
    """See `tf_redsync.ops.halves.half_decode`."""
    pairs = tf.bitcast(wire.moved(lambda m: m[:, wire.HEADER_WORDS :], messages), dtype)
    values = tf.reshape(tf.cast(pairs, tf.float32), [messages.shape[0], -1])
    if not add:
        return values
    return functools.reduce(tf.add, tf.unstack(values, num=messages.shape[0]))
