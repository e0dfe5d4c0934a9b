"""Pure-TensorFlow reference of decode: equal bits, rank by rank."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_redsync.ops.reference.common import after, assert_none, from_words


def decode(
    messages: tf.Tensor,
    k: tf.Tensor,
    like: Sequence[tf.Tensor],
    *,
    selectors: Sequence[str],
    quantized: Sequence[bool],
) -> list[tf.Tensor]:
    """See `tf_redsync.ops.decode`; all arguments are given and already checked."""
    sizes, slots = [tf.size(t, tf.int64) for t in like], tf.unstack(k, len(like))
    # Indices are sent in one block per tensor and its values (or one mean) in another.
    lengths = [
        word
        for slot, one_mean in zip(slots, quantized, strict=True)
        for word in ([1, 1, slot] if one_mean else [1, slot, slot])
    ]
    expected = 1 + tf.reduce_sum(tf.stack(lengths))
    words = tf.shape(messages)[1]
    text = "`messages` must have the number of words that `k` implies. Received (words, expected):"
    checks = [tf.debugging.Assert(tf.equal(words, expected), [text, words, expected])]
    flag, *parts = tf.split(after(checks, messages), [1, *lengths], 1)  # each [P, length]
    checks = [assert_none("messages", "flag", (flag != 0) & (flag != 1), flag, None)]
    used = tf.equal(flag, 1)
    totals = []
    for i, tensor in enumerate(like):
        count, second, third = parts[3 * i : 3 * i + 3]
        indices, values = (third, second) if quantized[i] else (second, third)
        indices = from_words(indices, sizes[i])
        count = tf.where(used, count, 0)  # [P, 1]
        checks += _check_part(i, count, indices, values, slots[i], sizes[i], quantized[i], used)
        values = tf.bitcast(values, tf.float32)
        totals.append(add_ranks(tensor, indices, values, after(checks, count)))
    return totals


def _check_part(i, count, indices, values, slots, size, one_mean: bool, used):
    """Checks of one tensor's part of all messages; `used` [P, 1] says whose flag is 1."""
    sent = tf.range(slots)[None, :] < count
    before = tf.pad(indices[:, :-1], [[0, 0], [1, 0]], constant_values=-1)[:, :slots]
    bad_index = sent & ((indices <= before) | (indices < 0) | (indices >= size))
    finite = tf.math.is_finite(tf.bitcast(values, tf.float32))
    bad_value = ~finite & (used if one_mean else sent)
    return [
        assert_none("messages", "count", (count < 0) | (count > slots), count, i),
        assert_none("messages", "index", bad_index, indices, i),
        assert_none("messages", "mean" if one_mean else "value", bad_value, values, i),
    ]


def add_ranks(like, indices, values, count):
    """Sum over ranks, in the order of the ranks, of their sparse contributions."""

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
