"""Pure-TensorFlow reference of `ops/bloom.py`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tf_redsync.ops.reference.common import (
    after,
    assert_shape,
    check_positions,
    from_words,
    to_bits,
    to_unsigned,
    to_words,
)

# The finalizer of SplitMix64: shift, multiply, shift, multiply, shift.
SEED_STEP, FACTOR_1, FACTOR_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
LOW_HALF = 2**32 - 1


def bloom_build(
    indices: Sequence[tf.Tensor],
    counts: tf.Tensor,
    seed: tf.Tensor,
    *,
    sizes: Sequence[int],
    words: Sequence[int],
    hashes: Sequence[int],
) -> tf.Tensor:
    """See `tf_redsync.ops.bloom_build`; all arguments are given and already checked."""
    counts = after([assert_shape("counts", counts, [len(indices)])], counts)
    filters = []
    for i, row in enumerate(indices):
        positions = from_words(row, sizes[i])
        checks = check_positions(positions, counts[i], sizes[i], i)
        used = after(checks, positions)[: counts[i]]
        set_bits = tf.concat(list(probes(used, seed, words[i], hashes[i])), 0)
        bits = tf.zeros([32 * words[i]], tf.int64)
        ones = tf.ones_like(set_bits)
        filters.append(to_words(tf.tensor_scatter_nd_max(bits, set_bits[:, None], ones)))
    return tf.concat(filters, 0)


def bloom_query(
    filters: tf.Tensor,
    seed: tf.Tensor,
    *,
    sizes: Sequence[int],
    slots: Sequence[int],
    words: Sequence[int],
    hashes: Sequence[int],
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """See `tf_redsync.ops.bloom_query`; all arguments are given and already checked."""
    filters = after([assert_shape("filters", filters, [-1, sum(words)])], filters)
    indices, counts = [], []
    for i, part in enumerate(tf.split(filters, list(words), 1)):
        bits = to_bits(part)
        held = tf.ones([tf.shape(bits)[0], sizes[i]], tf.bool)
        for probe in probes(tf.range(sizes[i], dtype=tf.int64), seed, words[i], hashes[i]):
            held &= tf.gather(bits, probe, axis=1) > 0
        before = tf.cumsum(tf.cast(held, tf.int64), axis=1, exclusive=True)
        listed = tf.where(held & (before < slots[i]))
        slot = tf.stack([listed[:, 0], tf.gather_nd(before, listed)], 1)
        shape = tf.cast(tf.stack([tf.shape(bits)[0], slots[i]]), tf.int64)
        indices.append(tf.scatter_nd(slot, to_unsigned(listed[:, 1]), shape))
        indices[-1].set_shape([None, slots[i]])
        listed = tf.minimum(tf.math.count_nonzero(held, axis=1, dtype=tf.int64), slots[i])
        counts.append(tf.cast(listed, tf.int32))
    return indices, tf.stack(counts, 1)


def probes(positions, seed, words: int, hashes: int):
    """Yield the bits that positions set, one int64 vector per hash."""
    seed = tf.cast(tf.bitcast(seed, tf.uint32), tf.uint64) + 1
    h = tf.cast(positions, tf.uint64) + seed * tf.constant(SEED_STEP, tf.uint64)
    for shift, factor in ((30, FACTOR_1), (27, FACTOR_2), (31, 1)):
        h = tf.bitwise.bitwise_xor(h, tf.bitwise.right_shift(h, np.uint64(shift)))
        h *= tf.constant(factor, tf.uint64)
    at, step = h & LOW_HALF, tf.bitwise.right_shift(h, np.uint64(32)) | 1
    for _ in range(hashes):
        yield tf.cast(tf.bitwise.right_shift(at * (32 * words), np.uint64(32)), tf.int64)
        at = (at + step) & LOW_HALF
