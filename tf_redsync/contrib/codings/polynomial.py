"""Polynomials fitted to sorted values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tf_redsync.codings.base import used
from tf_redsync.config import register
from tf_redsync.contrib.codings.sorted_values import (
    FittedCurve,
    descending,
    in_place,
    place_bits,
    place_words,
)
from tf_redsync.ops import bits, wire

DIVISORS = (100_000, 30_000, 10_000, 3_000, 1_000, 300, 100, 30, 10, 5, 1)  # of N, ends of segments
SHORTEST = 30  # values
COEFFICIENTS = 6


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class PolynomialFit(FittedCurve):
    """Polynomials fitted to sorted values.

    Fitted polynomials: `[positive values] [coefficients] [places]` for each tensor.

    Xu, Kostopoulou, Dutta, Li, Ntoulas, Kalnis (2021), "DeepReduce", NeurIPS: Fit-Poly. Values in
    descending order are a curve that changes its sign once. Positive and negative values are cut
    into segments, short ones where the curve is steep, at the large magnitudes, and each gets a
    polynomial of degree 5 by least squares:

        N positive values, from the largest on:     .., N / 300, N / 100, N / 30, N / 10, N / 5, N
        M negative values, from the smallest on:    the same with M

    each of them the end of a segment, as far as it has 30 values and more. What is sent: how many
    values are positive, 6 coefficients a segment, and the place of every value, ceil(log2 k) bits.

    Differences from the paper

    * Each segment's positions are mapped to [-1, 1] and the fit is in float64: powers of 1 .. k
      would make the equations too badly conditioned.
    * Messages have room for all segments that k values may take; those that are not needed are
      zeros.

    Args:
        least: Tensors that send fewer values than so many send them as float32; and so do those
            for which the fit would be longer.

    Raises:
        ValueError: for a hyper-parameter out of its range.
    """

    @override
    def fit_words(self, k: int) -> int:
        return 1 + _segments(k) * COEFFICIENTS + place_words(k)

    @override
    def fit(self, values: tf.Tensor, count: tf.Tensor) -> list[tf.Tensor]:
        curve = descending(values, count)
        positive = tf.math.count_nonzero(curve.values > 0, dtype=tf.int32)
        coefficients = tf.cast(_fit(curve.values, count, positive), tf.float32)
        return [
            positive[tf.newaxis],
            wire.to_words(tf.reshape(coefficients, [-1])),
            bits.packed(curve.places, place_bits(values.shape[0])),
        ]

    @override
    def fitted(self, words: tf.Tensor, count: tf.Tensor, k: int) -> tf.Tensor:
        size = _segments(k) * COEFFICIENTS
        positive, coefficients, places = tf.split(words, [1, size, place_words(k)], axis=1)
        coefficients = tf.reshape(wire.from_words(coefficients), [-1, _segments(k), COEFFICIENTS])
        segment, x = _segment(k, count, tf.clip_by_value(positive, 0, count))
        own = tf.gather(tf.cast(coefficients, tf.float64), segment, batch_dims=1)
        curve = tf.reduce_sum(own * _polynomials(x, COEFFICIENTS), axis=2)
        curve = used(tf.cast(curve, tf.float32), count)
        return in_place(curve, bits.unpacked(places, place_bits(k), k))


def _divisors(k: int) -> tuple[int, ...]:
    """Those of `DIVISORS` at which k values of one sign can have a segment end."""
    return tuple(d for d in DIVISORS if k // d >= SHORTEST or d == 1)


def _segments(k: int) -> int:
    """Segments of k values at most, of both signs together."""
    return 2 * len(_divisors(k))


def _ends(n: tf.Tensor, divisors: Sequence[int]) -> tf.Tensor:
    """Ends of the segments of n values of one sign, from the largest magnitude on.

    Args:
        n: int32 `[workers, 1]`.
        divisors: Of n, descending.

    Returns:
        int32 `[workers, divisors]`, ascending; too short segments are empty.
    """
    ends, before = [], tf.zeros_like(n)
    for divisor in divisors:
        end = n // divisor
        long_enough = (end - before >= SHORTEST) | tf.constant(divisor == 1)
        before = tf.where(long_enough, end, before)
        ends.append(before)
    return tf.concat(ends, axis=1)


def _segment(k: int, count: tf.Tensor, positive: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Number of every value's segment, int32, and its place there in [-1, 1], float64.

    Args:
        k: Slots.
        count: int32 `[workers, 1]`.
        positive: int32 `[workers, 1]`, how many values are positive.

    Returns:
        Both `[workers, k]`.
    """
    divisors = _divisors(k)
    up = _ends(positive, divisors)
    down = count - tf.reverse(_ends(count - positive, divisors), axis=[1])
    # Ascending ends of all segments: of positive values, then of the others.
    ends = tf.concat([up, down[:, 1:], count], axis=1)
    place = tf.broadcast_to(tf.range(k), [tf.shape(count)[0], k])
    segment = tf.minimum(tf.searchsorted(ends, place, side="right"), ends.shape[1] - 1)
    starts = tf.concat([tf.zeros_like(count), ends[:, :-1]], axis=1)
    start, end = (tf.gather(t, segment, batch_dims=1) for t in (starts, ends))
    length = tf.cast(tf.maximum(end - start - 1, 1), tf.float64)
    return segment, 2.0 * tf.cast(place - start, tf.float64) / length - 1.0


def _polynomials(x: tf.Tensor, count: int) -> tf.Tensor:
    """Chebyshev polynomials of degrees 0 to `count` - 1 at x, `[.., count]`."""
    terms = [tf.ones_like(x), x]
    while len(terms) < count:
        terms.append(2.0 * x * terms[-1] - terms[-2])
    return tf.stack(terms, axis=-1)


def _fit(curve: tf.Tensor, count: tf.Tensor, positive: tf.Tensor) -> tf.Tensor:
    """Least squares of every segment, float64 `[segments, 6]`."""
    k = curve.shape[0]
    segment, x = _segment(k, tf.reshape(count, [1, 1]), tf.reshape(positive, [1, 1]))
    terms = tf.where(
        tf.range(k)[:, tf.newaxis] < count, _polynomials(x[0], 2 * COEFFICIENTS - 1), 0.0
    )
    own = terms[:, :COEFFICIENTS] * curve[:, tf.newaxis]
    sums = tf.math.unsorted_segment_sum(terms, segment[0], _segments(k))
    right = tf.math.unsorted_segment_sum(own, segment[0], _segments(k))
    # Of two such polynomials the product is T[i] T[j] = (T[i + j] + T[|i - j|]) / 2.
    i = np.arange(COEFFICIENTS)
    left = tf.gather(sums, i[:, np.newaxis] + i, axis=1)
    left = (left + tf.gather(sums, np.abs(i[:, np.newaxis] - i), axis=1)) / 2.0
    ridge = 1e-12 * (1.0 + tf.linalg.trace(left))  # for segments of less than 6 values
    left += ridge[:, tf.newaxis, tf.newaxis] * tf.eye(COEFFICIENTS, dtype=tf.float64)
    return tf.linalg.solve(left, right[:, :, tf.newaxis])[:, :, 0]
