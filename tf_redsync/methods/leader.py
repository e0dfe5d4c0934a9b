"""What one worker knows and all need: words of a leader, by one all-reduce."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import tensorflow as tf

from tf_redsync.codings import bits
from tf_redsync.exchange.layout import BucketLayout
from tf_redsync.exchange.requests import AllReduce, Request

BITS = 24  # integers of so many bits are float32 numbers


def from_leader(
    words: tf.Tensor, finite: tf.Tensor, leader: tf.Tensor, layout: BucketLayout
) -> Generator[Request, Any, tf.Tensor]:
    """Send the leader's words to all workers.

    Use it as `words = yield from from_leader(...)`. Words are cut into pieces of 24 bits, which the
    leader adds to the zeros of the others. With m bytes of words and K workers every worker sends
    `8/3 m (K - 1) / K` bytes; an all-gather of all workers' words would send `m (K - 1)`.

    Args:
        words: int32 `[n]`, of this worker; those of the leader count. n is equal on all workers.
        finite: Bool scalar, whether all that this worker contributes to the step is finite.
        leader: int32 scalar, whose words; equal on all workers.
        layout: The bucket.

    Returns:
        int32 `[n]`, the leader's words; 0 unless everything is finite on all workers.
    """
    (size,) = words.shape
    padded = tf.pad(words, [[0, -size % 3]])
    pieces = tf.cast(bits.unpacked(padded[tf.newaxis], BITS, 4 * -(-size // 3))[0], tf.float32)
    own = tf.where(tf.equal(layout.rank, leader), pieces, tf.zeros_like(pieces))
    (pieces,) = yield AllReduce([own + tf.where(finite, 0.0, float("nan"))])
    all_finite = tf.reduce_all(tf.math.is_finite(pieces))
    pieces = tf.where(all_finite, pieces, tf.zeros_like(pieces))
    return bits.packed(tf.cast(pieces, tf.int32), BITS)[:size]
