"""Pure-TensorFlow reference of `decode` in `ops/selection.py`."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_redsync.ops.message_layout import MessageLayout
from tf_redsync.ops.reference.common import after, assert_none, from_words


def decode(
    messages: tf.Tensor, layout: MessageLayout, like: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """See `tf_redsync.ops.decode`; all arguments are given and already checked."""
    words, expected = tf.shape(messages)[1], layout.words
    text = "`messages` must have the number of words that `k` implies. Received (words, expected):"
    checks = [tf.debugging.Assert(tf.equal(words, expected), [text, words, expected])]
    parts = layout.split(after(checks, messages))
    flags, counts = parts.flags, tf.split(parts.counts, len(like), axis=1)
    checks = [assert_none("messages", "flag", (flags != 0) & (flags != 1), flags, None)]
    used = tf.equal(flags, 1)
    totals = []
    for i, (tensor, values) in enumerate(zip(like, parts.values, strict=True)):
        size = tf.size(tensor, tf.int64)
        indices = from_words(parts.indices[i], size)
        count = tf.where(used, counts[i], 0)  # [P, 1]
        checks += _check_part(i, count, indices, values, layout, size, used)
        totals.append(add_ranks(tensor, indices, values, after(checks, count)))
    return totals


def _check_part(i, count, indices, values, layout: MessageLayout, size, used):
    """Check one tensor's part of all messages; `used` [P, 1] has the ranks with flag 1."""
    slots, one_mean = layout.capacities[i], layout.quantized[i]
    sent = tf.range(slots)[None, :] < count
    before = tf.pad(indices[:, :-1], [[0, 0], [1, 0]], constant_values=-1)[:, :slots]
    bad_index = sent & ((indices <= before) | (indices < 0) | (indices >= size))
    bad_value = ~tf.math.is_finite(values) & (used if one_mean else sent)
    bits = tf.bitcast(values, tf.int32)
    return [
        assert_none("messages", "count", (count < 0) | (count > slots), count, i),
        assert_none("messages", "index", bad_index, indices, i),
        assert_none("messages", "mean" if one_mean else "value", bad_value, bits, i),
    ]


def add_ranks(like, indices, values, count):
    """Sum the sparse contributions of the ranks, in their order."""

    def add(rank, total):
        used = count[rank, 0]
        row = tf.broadcast_to(values[rank], tf.shape(indices[rank]))[:used]
        return rank + 1, tf.tensor_scatter_nd_add(total, indices[rank, :used, None], row)

    total = tf.zeros([tf.size(like, tf.int64)], tf.float32)
    ranks = tf.shape(indices)[0]
    _, total = tf.while_loop(
        lambda rank, _: rank < ranks,
        add,
        (tf.constant(0), total),
        shape_invariants=(tf.TensorShape([]), tf.TensorShape([None])),
    )
    total = tf.reshape(total, tf.shape(like, tf.int64))
    total.set_shape(like.shape)
    return total
