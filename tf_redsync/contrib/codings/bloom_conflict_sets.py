"""Policy P2 of DeepReduce: which positives of a Bloom filter are most likely no false ones.

Xu, Kostopoulou, Dutta, Li, Ntoulas, Kalnis (2021), "DeepReduce", NeurIPS. For every bit j of the
filter, the conflict set C_j has the positives that set bit j. Some element of C_j is a true one,
since the bit is set. From the smallest set on, and among equals from the lowest bit on:

    if no element of C_j is left: nothing
    else: take one of those that are left, at random

until enough are taken. A true positive is alone in a set more often than a false one. Each turn
depends on the one before, so this is slow: it is here to compare with.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_redsync.ops.message_layout import unsigned
from tf_redsync.ops.reference.bloom import probes


def by_conflicts(
    at: tf.Tensor,
    count: tf.Tensor,
    noise: tf.Tensor,
    seed: tf.Tensor,
    *,
    words: int,
    hashes: int,
    limit: int,
) -> tf.Tensor:
    """Order positives by when they are taken; those that are not come last, in their order.

    Args:
        at: int32 `[workers, slots]`, the positives of each worker's filter.
        count: int32 `[workers, 1]`, how many are used.
        noise: float32 `[slots]`; of a set the element with the least is taken.
        seed: As given to `bloom_build`.
        words: Of the filter.
        hashes: Of the filter.
        limit: How many to take at most.

    Returns:
        int32 `[workers, slots]`.
    """

    def ordered(row: tf.Tensor) -> tf.Tensor:
        return _by_conflicts(row[0], row[1][0], noise, seed, words, hashes, limit)

    return tf.map_fn(
        ordered, (at, count), fn_output_signature=tf.TensorSpec(at.shape[1:], tf.int32)
    )


def _by_conflicts(
    at: tf.Tensor,
    count: tf.Tensor,
    noise: tf.Tensor,
    seed: tf.Tensor,
    words: int,
    hashes: int,
    limit: int,
) -> tf.Tensor:
    slots = at.shape[0]
    element, bit = _incidences(at, count, noise, seed, words, hashes)
    sizes = tf.math.bincount(bit, minlength=32 * words, maxlength=32 * words)
    first = tf.cumsum(sizes, exclusive=True)
    sets = tf.argsort(tf.where(sizes > 0, sizes, tf.int32.max), stable=True)
    used_sets = tf.math.count_nonzero(sizes, dtype=tf.int32)

    def take(number: tf.Tensor, taken: tf.Tensor, when: tf.Tensor) -> Any:
        begin = first[sets[number]]
        members = element[begin : begin + sizes[sets[number]]]
        left = tf.boolean_mask(members, tf.gather(when, members) >= slots)[:1]
        now = tf.fill(tf.shape(left), taken)
        when = tf.tensor_scatter_nd_update(when, left[:, tf.newaxis], now)
        return number + 1, taken + tf.size(left), when

    def go_on(number: tf.Tensor, taken: tf.Tensor, when: tf.Tensor) -> Any:
        return (number < used_sets) & (taken < limit)

    start = (tf.constant(0), tf.constant(0), slots + tf.range(slots))
    when = tf.while_loop(go_on, take, start)[2]
    return tf.gather(at, tf.argsort(when, stable=True))


def _incidences(
    at: tf.Tensor, count: tf.Tensor, noise: tf.Tensor, seed: tf.Tensor, words: int, hashes: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """All distinct pairs of a positive's place and a bit that it sets, by bit, then by noise."""
    places = tf.argsort(noise[:count], stable=True)
    positions = unsigned(tf.gather(at, places))
    bits = tf.stack(list(probes(positions, seed, words, hashes)))  # [hashes, count]
    number = tf.size(places, tf.int64)
    pairs = tf.unique(tf.sort(tf.reshape(bits * number + tf.range(number), [-1])))[0]
    number = tf.maximum(number, 1)
    return tf.gather(places, pairs % number), tf.cast(pairs // number, tf.int32)
