"""Messages of two-phase quantized reductions, with one block of every tensor for each worker.

Every tensor is cut into K blocks, and worker b reduces block b. The first phase sends the codes of
block b to worker b in one all-to-all; the second sends the codes of the sums to all workers in one
all-gather. The codes are those of `ops.quantize` for all blocks in the order of `by_worker`.
"""

from __future__ import annotations

import tensorflow as tf

from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.ops import wire
from tf_redsync.ops.wire import map_words

Blocks = list[tf.Tensor]  # one tensor [workers, length] for each tensor of the bucket


def cut(tensor: tf.Tensor, spec: TensorSpec, workers: int) -> tf.Tensor:
    """Return a tensor as `[workers, length]`, padded with zeros."""
    length = -(-spec.size // workers)
    padded = tf.pad(tf.reshape(tensor, [-1]), [[0, workers * length - spec.size]])
    return tf.reshape(padded, [workers, length])


def joined(blocks: Blocks, layout: BucketLayout) -> list[tf.Tensor]:
    """Undo `cut` for every tensor of a bucket."""
    return [
        tf.reshape(tf.reshape(b, [-1])[: s.size], s.shape)
        for b, s in zip(blocks, layout.specs, strict=True)
    ]


def by_worker(blocks: Blocks) -> list[tf.Tensor]:
    """Return all blocks as vectors: those of all tensors for worker 0, then for worker 1, ..."""
    return [row for rows in zip(*[tf.unstack(b) for b in blocks], strict=True) for row in rows]


def by_tensor(parts: list[tf.Tensor], tensors: int) -> Blocks:
    """Undo `by_worker`."""
    return [tf.stack(parts[i::tensors]) for i in range(tensors)]


def for_each_worker(message: tf.Tensor, scales: int, workers: int) -> tf.Tensor:
    """Split a message of all blocks into one message for each worker.

    Args:
        message: int32 `[words]`, from `ops.quantize` of blocks in the order of `by_worker`.
        scales: Number of scales in the message of one worker.
        workers: K.

    Returns:
        int32 `[workers, words]`.
    """

    def apart(message: tf.Tensor) -> tf.Tensor:
        flag, scale_words, codes = tf.split(message, [1, scales * workers, -1])
        parts = [tf.repeat(flag, workers), scale_words, codes]
        return tf.concat([tf.reshape(p, [workers, -1]) for p in parts], axis=1)

    return map_words(apart, message)


def one_message(messages: tf.Tensor, scales: int) -> tf.Tensor:
    """Undo `for_each_worker`, for messages `[workers, words]` of several workers: `[1, words]`."""

    def together(messages: tf.Tensor) -> tf.Tensor:
        _, scale_words, codes = tf.split(messages, [1, scales, -1], axis=1)
        return tf.concat([tf.reshape(p, [-1]) for p in (scale_words, codes)], axis=0)

    return wire.as_one(messages, map_words(together, messages))
