"""What one worker knows and all need: words of a leader, by one all-reduce."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import tensorflow as tf

from tf_redsync.exchange.context import Context
from tf_redsync.exchange.requests import AllReduce, Request

PLACES = (1, 256, 65536)  # of three bytes in an integer of 24 bits, which float32 holds as it is


def from_leader(
    words: tf.Tensor, finite: tf.Tensor, leader: tf.Tensor, ctx: Context
) -> Generator[Request, Any, tf.Tensor]:
    """Send the leader's words to all workers.

    Use it as `words = yield from from_leader(...)`. Words are cut into pieces of 24 bits, which the
    leader adds to the zeros of the others. With m bytes of words and K workers every worker sends
    `8/3 m (K - 1) / K` bytes; an all-gather of all workers' words would send `m (K - 1)`.

    Args:
        words: int32 `[n]`, of this worker; those of the leader count. n is equal on all workers.
        finite: Bool scalar, whether all that this worker contributes to the step is finite.
        leader: int32 scalar, whose words; equal on all workers.
        ctx: The exchange's.

    Returns:
        int32 `[n]`, the leader's words; 0 unless everything is finite on all workers.
    """
    (size,) = words.shape
    octets = tf.bitcast(tf.pad(words, [[0, -size % 3]]), tf.uint8)
    pieces = tf.cast(tf.reshape(octets, [-1, 3]), tf.float32) * tf.constant(PLACES, tf.float32)
    own = tf.where(tf.equal(ctx.rank, leader), tf.reduce_sum(pieces, axis=1), 0.0)
    (numbers,) = yield AllReduce([own + tf.where(finite, 0.0, float("nan"))])
    all_finite = tf.reduce_all(tf.math.is_finite(numbers))
    numbers = tf.cast(tf.where(all_finite, numbers, 0.0), tf.int32)[:, tf.newaxis]
    octets = tf.reshape(tf.cast(numbers // PLACES % 256, tf.uint8), [-1, 4])
    return tf.bitcast(octets, tf.int32)[:size]
