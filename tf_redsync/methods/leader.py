"""What one worker knows and all need: a broadcast of two requests."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import tensorflow as tf

from tf_redsync.exchange.layout import BucketLayout
from tf_redsync.exchange.requests import AllGather, AllToAll, Request


def from_leader(
    words: tf.Tensor, finite: tf.Tensor, leader: tf.Tensor, layout: BucketLayout
) -> Generator[Request, Any, tf.Tensor]:
    """Send the leader's words to all workers, by a scatter and an all-gather.

    Use it as `words = yield from from_leader(...)`. Each worker gets one of K parts from the leader
    and passes it on to all others, as MPI libraries broadcast long messages: with m bytes every
    worker sends about 2 m (K - 1) / K, an all-gather of all workers' words would send m (K - 1).

    Args:
        words: int32 `[n]`, of this worker; those of the leader count. n is equal on all workers.
        finite: Bool scalar, whether all that this worker contributes to the step is finite.
        leader: int32 scalar, whose words; equal on all workers.
        layout: The bucket.

    Returns:
        int32 `[n]`, the leader's words; 0 if something of the leader is not finite.
    """
    workers, (size,) = layout.workers, words.shape
    parts = tf.pad(words, [[0, -size % workers]])
    flags = tf.ones([workers, 1], tf.int32)
    rows = tf.concat([flags, tf.reshape(parts, [workers, -1])], axis=1)
    received = yield AllToAll(tf.where(finite, rows, tf.zeros_like(rows)))
    messages = yield AllGather(tf.gather(tf.ensure_shape(received, rows.shape), leader))
    return tf.reshape(messages[:, 1:], [-1])[:size]
