"""Sums over workers of what their messages stand for, decoded in groups of workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

VALUES = 2**22  # decoded at a time: 16 MiB


def added_up(
    messages: tf.Tensor, workers: int, values: Callable[[tf.Tensor], tf.Tensor], size: int
) -> tf.Tensor:
    """Add up what the messages of all workers stand for, rank by rank.

    A loop over groups of workers, so that memory does not grow with their number.

    Args:
        messages: int32 `[workers, words]`.
        workers: Number of workers.
        values: Returns for messages, int32 `[rows, words]`, what they stand for, float32
            `[rows, size]`: zeros for a message of zeros.
        size: Number of values.

    Returns:
        float32 `[size]`.
    """
    group = max(1, min(workers, VALUES // max(size, 1)))
    groups = -(-workers // group)
    # As float32 with the same bits, which a GPU moves, and takes into a loop.
    padded = tf.pad(tf.bitcast(messages, tf.float32), [[0, groups * group - workers], [0, 0]])
    padded = tf.reshape(padded, [groups, group, -1])

    def add(number: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        for row in tf.unstack(values(tf.bitcast(padded[number], tf.int32)), num=group):
            total += row
        return number + 1, total

    start = (tf.constant(0), tf.zeros([size]))
    return tf.while_loop(lambda number, _: number < groups, add, start, parallel_iterations=1)[1]


def spread(scales: tf.Tensor, sizes: Sequence[int]) -> tf.Tensor:
    """Return one scale a tensor, `[rows, N]`, as one an element, `[rows, sum(sizes)]`.

    Of a single tensor as `[rows, 1]`, for the op that uses it to broadcast. `tf.repeat` would make
    a mask of N times the largest size.
    """
    if len(sizes) == 1:
        return scales
    rows, columns = tf.shape(scales)[0], tf.split(scales, len(sizes), axis=1)
    parts = [tf.broadcast_to(c, [rows, n]) for c, n in zip(columns, sizes, strict=True)]
    return tf.concat(parts, axis=1)
