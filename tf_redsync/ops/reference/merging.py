"""Pure-TensorFlow reference of `ops/merging.py`: sums at all received positions, then a top-k."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_redsync.ops.reference.common import (
    after,
    assert_none,
    assert_shape,
    from_words,
    to_unsigned,
)
from tf_redsync.ops.reference.decode import add_ranks
from tf_redsync.ops.reference.selection import top_k


def merge(
    indices: Sequence[tf.Tensor],
    values: Sequence[tf.Tensor],
    counts: tf.Tensor,
    *,
    sizes: Sequence[int],
    k: Sequence[int],
) -> tuple[list, list, tf.Tensor, list, list, tf.Tensor]:
    """See `tf_redsync.ops.sparse_merge`; all arguments are given and already checked."""
    counts = after([assert_shape("counts", counts, [-1, len(indices)])], counts)
    kept, dropped = [], []
    for i, size in enumerate(sizes):
        count, blocks = counts[:, i : i + 1], tf.shape(counts)[0]
        slots = tf.shape(indices[i])[-1]
        positions = from_words(indices[i], size)
        checks = [
            assert_shape("indices", indices[i], [blocks, slots]),
            assert_shape("values", values[i], [blocks, slots]),
            *_check_block(positions, values[i], count, size, i),
        ]
        count = after(checks, count)
        sent = tf.boolean_mask(positions, tf.range(slots) < count)
        places, _ = tf.unique(tf.sort(sent))
        # `tf.searchsorted` fails in a graph if there are no places.
        at = tf.raw_ops.LowerBound(
            sorted_inputs=places[tf.newaxis], values=tf.reshape(positions, [1, -1])
        )
        at = tf.reshape(at, [blocks, slots])  # unused slots have arbitrary places
        total = add_ranks(tf.zeros([tf.size(places)]), at, values[i], count)
        largest = top_k(tf.abs(total), tf.minimum(k[i], tf.size(places)))
        others = tf.tensor_scatter_nd_update(
            total, largest[:, None], tf.zeros_like(largest, total.dtype)
        )
        rest = tf.reshape(tf.where(tf.abs(others) > 0.0), [-1])
        kept.append(_padded(places, total, largest, k[i]))
        dropped.append(_padded(places, total, rest, blocks * slots))
    return *_columns(kept), *_columns(dropped)


def _check_block(positions, values, count, size: int, i: int):
    slots = tf.shape(positions)[-1]
    valid = tf.range(slots) < count
    previous = tf.pad(positions[:, :-1], [[0, 0], [1, 0]], constant_values=-1)
    outside = (positions < 0) | (positions >= size)
    return [
        assert_none("blocks", "count", (count < 0) | (count > slots), count, i),
        assert_none("blocks", "index", valid & outside, positions, i),
        assert_none(
            "blocks", "index, which must ascend,", valid & (positions <= previous), positions, i
        ),
        assert_none("blocks", "value", valid & ~tf.math.is_finite(values), values, i),
    ]


def _padded(places, total, chosen, slots):
    """Return positions and values of the chosen sums, padded to `slots`, and their number."""
    count = tf.size(chosen)
    padding = [[0, slots - count]]
    values = tf.pad(tf.gather(total, chosen), padding)
    return tf.pad(to_unsigned(tf.gather(places, chosen)), padding), values, count


def _columns(outputs):
    indices, values, counts = zip(*outputs, strict=True)
    return list(indices), list(values), tf.stack(counts)
