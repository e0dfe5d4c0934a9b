"""Small integers of many workers, added up by an all-reduce of floating-point numbers.

Codes -1, 0, 1 of K workers have sums from -K to K: digits in base B = 2 K + 1. A float32 holds all
integers up to 2^24, so D digits fit one number as long as (B^D - 1) / 2 <= 2^24, and neither the
sum of K such numbers nor any part of that sum is ever rounded.
"""

from __future__ import annotations

import tensorflow as tf

MAX_INTEGER = 2**24  # float32 has all integers up to here


def digits_per_number(workers: int) -> int:
    """D, the number of codes that travel in a float32.

    Example:
        >>> [digits_per_number(workers) for workers in (1, 2, 8, 64)]
        [15, 10, 6, 3]
    """
    base, digits = 2 * workers + 1, 1
    while (base ** (digits + 1) - 1) // 2 <= MAX_INTEGER:
        digits += 1
    return digits


def packed_digits(codes: tf.Tensor, workers: int) -> tf.Tensor:
    """Pack codes -1, 0, 1, float32 `[n]`, into float32 `[ceil(n / D)]`."""
    base, digits = 2 * workers + 1, digits_per_number(workers)
    numbers = -(-codes.shape[0] // digits)
    places = tf.reshape(tf.pad(codes, [[0, digits * numbers - codes.shape[0]]]), [digits, numbers])
    weights = tf.constant([[float(base**d)] for d in range(digits)])
    return tf.reduce_sum(weights * places, axis=0)


def unpacked_digits(sums: tf.Tensor, size: int, workers: int) -> tf.Tensor:
    """Return the sums of the codes, float32 `[size]`, of the sums of the packed numbers."""
    base, digits = 2 * workers + 1, digits_per_number(workers)
    rest = tf.cast(sums, tf.int32) + (base**digits - 1) // 2  # digits 0 .. 2 K
    places = []
    for _ in range(digits):
        places.append(rest % base - workers)
        rest //= base
    return tf.cast(tf.concat(places, axis=0)[:size], tf.float32)
