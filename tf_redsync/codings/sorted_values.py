"""What fits of value curves share: values in descending order, and the way back.

Sorted values make a smooth curve, of which a few numbers tell enough. The order is lost then, so
that the place of every value is sent: ceil(log2 k) bits of k values.
"""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from tf_redsync.codings import bits


class Sorted(NamedTuple):
    """Values in descending order.

    Attributes:
        values: float64 `[slots]`; 0 after the first `count`.
        places: int32 `[slots]`, which value stands where: `values[i]` was at `places[i]`.
    """

    values: tf.Tensor
    places: tf.Tensor


def place_bits(slots: int) -> int:
    """Bits of a place among `slots`."""
    return max(slots - 1, 0).bit_length()


def place_words(slots: int) -> int:
    """Words of all places."""
    return bits.packed_words(slots, place_bits(slots))


def descending(values: tf.Tensor, count: tf.Tensor) -> Sorted:
    """Sort the first `count` of float32 `[slots]`; the others stay behind them."""
    is_used = tf.range(values.shape[0]) < count
    order = tf.argsort(
        tf.where(is_used, values, -float("inf")), direction="DESCENDING", stable=True
    )
    sorted_ = tf.where(is_used, tf.gather(values, order), 0.0)
    return Sorted(tf.cast(sorted_, tf.float64), order)


def in_place(values: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
    """Undo `descending`.

    Args:
        values: float32 `[workers, slots]`.
        places: int32 `[workers, slots]`; those out of range are left out, as no encoder makes any.
    """
    workers, slots = values.shape[0], values.shape[1]
    row = tf.repeat(tf.range(workers), slots)
    at = tf.stack([row, tf.minimum(tf.reshape(places, [-1]), slots)], axis=1)
    return tf.scatter_nd(at, tf.reshape(values, [-1]), [workers, slots + 1])[:, :slots]
