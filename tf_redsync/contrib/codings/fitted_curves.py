"""DeepReduce's codings of values: curves fitted to the values in sorted order.

Xu, Kostopoulou, Dutta, Li, Ntoulas, Kalnis (2021), "DeepReduce", NeurIPS: Fit-Poly and Fit-DExp.
Sorted values form a smooth curve that a few parameters describe. Sorting loses the order, so the
message also has the place of every value: ceil(log2 k) bits for each of k values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.codings.base import CodedValues, ValueCoding, used
from tf_redsync.config import register
from tf_redsync.ops import bits, wire
from tf_redsync.ops.wire import leading

# Segments of N values of one sign end at N / divisor.
DIVISORS = (100_000, 30_000, 10_000, 3_000, 1_000, 300, 100, 30, 10, 5, 1)
SHORTEST = 30  # minimum number of values of a segment
COEFFICIENTS = 6  # of a polynomial of degree 5

STEEPEST = 80.0  # bound of |b| and |d|: e^80 is finite in float32
CLOSEST = 0.1  # minimum distance of b and d; below it, large a and c would cancel


class Sorted(NamedTuple):
    """Values in descending order.

    Attributes:
        values: float64 `[slots]`; 0 after the first `count`.
        places: int32 `[slots]`, the permutation: `values[i]` was at `places[i]`.
    """

    values: tf.Tensor
    places: tf.Tensor


def place_bits(slots: int) -> int:
    """Return the bits of a place among `slots`."""
    return max(slots - 1, 0).bit_length()


def place_words(slots: int) -> int:
    """Return the words of all places."""
    return bits.packed_words(slots, place_bits(slots))


def descending(values: tf.Tensor, count: tf.Tensor) -> Sorted:
    """Sort the first `count` of float32 `[slots]` in descending order; the rest stays last."""
    is_used = leading(count, values.shape[0])
    order = tf.argsort(
        tf.where(is_used, values, -float("inf")), direction="DESCENDING", stable=True
    )
    sorted_ = tf.where(is_used, tf.gather(values, order), 0.0)
    return Sorted(tf.cast(sorted_, tf.float64), order)


def in_place(values: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
    """Undo `descending`.

    Args:
        values: float32 `[workers, slots]`.
        places: int32 `[workers, slots]`; places out of range are ignored.
    """
    workers, slots = values.shape[0], values.shape[1]
    row = tf.repeat(tf.range(workers), slots)
    at = tf.stack([row, tf.minimum(tf.reshape(places, [-1]), slots)], axis=1)
    return tf.scatter_nd(at, tf.reshape(values, [-1]), [workers, slots + 1])[:, :slots]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FittedCurve(ValueCoding):
    """Base class of codings that fit a curve to the values of each tensor.

    Args:
        least: Minimum number of values for a fit. Tensors that send fewer values, or for which a
            fit would be longer, send them as float32.
    """

    least: int = 1000

    FEWEST: ClassVar[int] = 1  # minimum number of values for a well-defined fit
    paper: ClassVar[str] = "Xu, Kostopoulou, Dutta, Li, Ntoulas, Kalnis 2021"

    def __post_init__(self) -> None:
        checks.integer("least", self.least, low=0)

    def fit_words(self, k: int) -> int:
        """Return the words of a fit of k values."""
        raise NotImplementedError

    def fit(self, values: tf.Tensor, count: tf.Tensor) -> list[tf.Tensor]:
        """Return the fit of the first `count` of float32 `[slots]`, int32 vectors."""
        raise NotImplementedError

    def fitted(self, words: tf.Tensor, count: tf.Tensor, k: int) -> tf.Tensor:
        """Decode fits to values.

        Args:
            words: int32 `[workers, fit_words(k)]`.
            count: int32 `[workers, 1]`.
            k: Slots.

        Returns:
            float32 `[workers, k]`, 0 after the first `count`.
        """
        raise NotImplementedError

    @override
    def words(self, slots: Sequence[Any]) -> Any:
        return sum(map(self._words, slots))

    @override
    def encode(
        self, values: Sequence[tf.Tensor], counts: tf.Tensor, stream: tf.Tensor
    ) -> CodedValues:
        words, slots = [], [v.shape[0] for v in values]
        for tensor, k, count in zip(values, slots, tf.unstack(counts), strict=True):
            words += self.fit(tensor, count) if self._fits(k) else [wire.to_words(tensor)]
        code = tf.concat(words, axis=0)
        sent = self.decode(code[tf.newaxis], counts[tf.newaxis], slots)
        return CodedValues(code, [v[0] for v in sent])

    @override
    def decode(self, words: tf.Tensor, counts: tf.Tensor, slots: Sequence[Any]) -> list[tf.Tensor]:
        values, parts = [], tf.split(words, list(map(self._words, slots)), axis=1)
        for i, (k, part) in enumerate(zip(slots, parts, strict=True)):
            count = counts[:, i : i + 1]
            if self._fits(k):
                values.append(self.fitted(part, count, k))
            else:
                values.append(used(wire.from_words(part), count))
        return values

    def _fits(self, k: int) -> bool:
        """Return whether the code of k values is a fit."""
        return k >= max(self.least, self.FEWEST) and self.fit_words(k) < k

    def _words(self, k: int) -> int:
        return self.fit_words(k) if self._fits(k) else k


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class PolynomialFit(FittedCurve):
    """Fit-Poly: piecewise polynomials fitted to the sorted values.

    The code of a tensor is `[number of positive values] [coefficients] [places]`.

    Xu, Kostopoulou, Dutta, Li, Ntoulas, Kalnis (2021), "DeepReduce", NeurIPS: Fit-Poly. Values in
    descending order form a curve with one change of sign. Positive and negative values are cut into
    segments, which are short where the curve is steep, at large magnitudes. Least squares give a
    polynomial of degree 5 for each segment:

        N positive values, from the largest on:     ..., N / 300, N / 100, N / 30, N / 10, N / 5, N
        M negative values, from the smallest on:    the same with M

    Each of these numbers is the end of a segment if that has at least 30 values. The message has
    the number of positive values, 6 coefficients per segment, and the place of every value,
    ceil(log2 k) bits.

    Differences from the paper

    * The positions in a segment are mapped to [-1, 1], and the fit uses float64 and Chebyshev
      polynomials: the normal equations of powers of 1 .. k would be ill-conditioned.
    * Messages have a capacity for the maximum number of segments of k values; unused ones are
      zeros.

    Args:
        least: Minimum number of values for a fit. Tensors that send fewer values, or for which a
            fit would be longer, send them as float32.

    Raises:
        ValueError: If an argument is out of range; the message names it.
    """

    @override
    def fit_words(self, k: int) -> int:
        return 1 + _segments(k) * COEFFICIENTS + place_words(k)

    @override
    def fit(self, values: tf.Tensor, count: tf.Tensor) -> list[tf.Tensor]:
        curve = descending(values, count)
        positive = tf.math.count_nonzero(curve.values > 0, dtype=tf.int32)
        coefficients = tf.cast(_fit_polynomials(curve.values, count, positive), tf.float32)
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
        by_element = tf.gather(tf.cast(coefficients, tf.float64), segment, batch_dims=1)
        curve = tf.reduce_sum(by_element * _polynomials(x, COEFFICIENTS), axis=2)
        curve = used(tf.cast(curve, tf.float32), count)
        return in_place(curve, bits.unpacked(places, place_bits(k), k))


def _divisors(k: int) -> tuple[int, ...]:
    """Return the divisors at which k values of one sign can have the end of a segment."""
    return tuple(d for d in DIVISORS if k // d >= SHORTEST or d == 1)


def _segments(k: int) -> int:
    """Return the maximum number of segments of k values, for both signs together."""
    return 2 * len(_divisors(k))


def _ends(n: tf.Tensor, divisors: Sequence[int]) -> tf.Tensor:
    """Return the ends of the segments of n values of one sign, from the largest magnitude on.

    Args:
        n: int32 `[workers, 1]`.
        divisors: Divisors of n, descending.

    Returns:
        int32 `[workers, divisors]`, ascending; segments that would be too short are empty.
    """
    ends, before = [], tf.zeros_like(n)
    for divisor in divisors:
        end = n // divisor
        long_enough = (end - before >= SHORTEST) | tf.constant(divisor == 1)
        before = tf.where(long_enough, end, before)
        ends.append(before)
    return tf.concat(ends, axis=1)


def _segment(k: int, count: tf.Tensor, positive: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the segment of every value, int32, and its position there in [-1, 1], float64.

    Args:
        k: Number of slots.
        count: int32 `[workers, 1]`.
        positive: int32 `[workers, 1]`, number of positive values.

    Returns:
        Both `[workers, k]`.
    """
    divisors = _divisors(k)
    up = _ends(positive, divisors)
    down = count - tf.reverse(_ends(count - positive, divisors), axis=[1])
    # Ends of all segments, ascending: those of positive values, then those of the others.
    ends = tf.concat([up, down[:, 1:], count], axis=1)
    place = tf.broadcast_to(tf.range(k), [tf.shape(count)[0], k])
    segment = tf.minimum(tf.searchsorted(ends, place, side="right"), ends.shape[1] - 1)
    starts = tf.concat([tf.zeros_like(count), ends[:, :-1]], axis=1)
    start, end = (tf.gather(t, segment, batch_dims=1) for t in (starts, ends))
    length = tf.cast(tf.maximum(end - start - 1, 1), tf.float64)
    return segment, 2.0 * tf.cast(place - start, tf.float64) / length - 1.0


def _polynomials(x: tf.Tensor, count: int) -> tf.Tensor:
    """Return Chebyshev polynomials of degrees 0 to `count` - 1 at x, `[..., count]`."""
    terms = [tf.ones_like(x), x]
    while len(terms) < count:
        terms.append(2.0 * x * terms[-1] - terms[-2])
    return tf.stack(terms, axis=-1)


def _fit_polynomials(curve: tf.Tensor, count: tf.Tensor, positive: tf.Tensor) -> tf.Tensor:
    """Return the least-squares coefficients of every segment, float64 `[segments, 6]`."""
    k = curve.shape[0]
    segment, x = _segment(k, tf.reshape(count, [1, 1]), tf.reshape(positive, [1, 1]))
    terms = tf.where(
        tf.range(k)[:, tf.newaxis] < count, _polynomials(x[0], 2 * COEFFICIENTS - 1), 0.0
    )
    products = terms[:, :COEFFICIENTS] * curve[:, tf.newaxis]
    sums = tf.math.unsorted_segment_sum(terms, segment[0], _segments(k))
    right = tf.math.unsorted_segment_sum(products, segment[0], _segments(k))
    # The product of two Chebyshev polynomials is T[i] T[j] = (T[i + j] + T[|i - j|]) / 2.
    i = np.arange(COEFFICIENTS)
    left = tf.gather(sums, i[:, np.newaxis] + i, axis=1)
    left = (left + tf.gather(sums, np.abs(i[:, np.newaxis] - i), axis=1)) / 2.0
    ridge = 1e-12 * (1.0 + tf.linalg.trace(left))  # for segments of fewer than 6 values
    left += ridge[:, tf.newaxis, tf.newaxis] * tf.eye(COEFFICIENTS, dtype=tf.float64)
    return tf.linalg.solve(left, right[:, :, tf.newaxis])[:, :, 0]


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class DoubleExponentialFit(FittedCurve):
    """Fit-DExp: the sum of two exponentials fitted to the sorted magnitudes.

    The code of a tensor is `[a, b, c, d] [places and signs]`.

    Xu, Kostopoulou, Dutta, Li, Ntoulas, Kalnis (2021), "DeepReduce", NeurIPS: Fit-DExp. Magnitudes
    in descending order, y at x in [0, 1], are approximated by a e^(b x) + c e^(d x): four numbers
    per tensor.

    The fit is not iterative (Jean Jacquelin, 2009, "Régressions et équations intégrales"): with the
    integrals S of y and SS of S, such a function satisfies

        y = -b d SS + (b + d) S + p x + q

    exactly. Least squares give b + d and b d, hence b and d, and a second least-squares fit gives a
    and c.

    The message has a, b, c, d as float32, and the place of every value, ceil(log2 k) bits, and its
    sign.

    Args:
        least: Minimum number of values for a fit. Tensors that send fewer values, or for which a
            fit would be longer, send them as float32.

    Raises:
        ValueError: If an argument is out of range; the message names it.
    """

    FEWEST: ClassVar[int] = 4

    @override
    def fit_words(self, k: int) -> int:
        return 4 + bits.packed_words(k, 1 + place_bits(k))

    @override
    def fit(self, values: tf.Tensor, count: tf.Tensor) -> list[tf.Tensor]:
        curve = descending(tf.abs(values), count)
        negative = tf.cast(tf.gather(values, curve.places) < 0, tf.int32)
        numbers = tf.cast(_fit_exponentials(curve.values, count), tf.float32)
        code = bits.packed(2 * curve.places + negative, 1 + place_bits(values.shape[0]))
        return [wire.to_words(numbers), code]

    @override
    def fitted(self, words: tf.Tensor, count: tf.Tensor, k: int) -> tf.Tensor:
        numbers = tf.cast(wire.from_words(words[:, :4]), tf.float64)
        a, b, c, d = tf.split(numbers, 4, axis=1)
        x = _abscissae(k, count)
        curve = tf.maximum(a * tf.exp(b * x) + c * tf.exp(d * x), 0.0)
        curve = used(tf.cast(curve, tf.float32), count)
        codes = bits.unpacked(words[:, 4:], 1 + place_bits(k), k)
        return in_place(tf.where(codes % 2 == 1, -curve, curve), codes // 2)


def _abscissae(k: int, count: tf.Tensor) -> tf.Tensor:
    """Return x of every value, float64: 0 for the first, 1 for the last used value."""
    return tf.cast(tf.range(k), tf.float64) / tf.cast(tf.maximum(count - 1, 1), tf.float64)


def _fit_exponentials(y: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """Return a, b, c, d for float64 `[k]`, of which the first `count` are used; float64 `[4]`."""
    k = y.shape[0]
    x, is_used = _abscissae(k, count), leading(count, k)
    scale = tf.maximum(tf.reduce_max(y), 1e-300)
    y = tf.where(is_used, y / scale, 0.0)
    s = _integral(x, y)
    ss = _integral(x, s)
    ones = tf.ones_like(x)
    product, total = tf.unstack(_least_squares(is_used, y, ss, s, x, ones)[:2])
    root = tf.sqrt(tf.maximum(total * total + 4.0 * product, CLOSEST**2))
    b = tf.clip_by_value((total + root) / 2.0, -STEEPEST, STEEPEST)
    d = tf.clip_by_value((total - root) / 2.0, -STEEPEST, STEEPEST)
    a, c = tf.unstack(_least_squares(is_used, y, tf.exp(b * x), tf.exp(d * x)))
    return tf.stack([a * scale, b, c * scale, d])


def _integral(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Return the integral of y from the first x on, by the trapezoidal rule."""
    areas = 0.5 * (y[1:] + y[:-1]) * (x[1:] - x[:-1])
    return tf.concat([[0.0], tf.cumsum(areas)], axis=0)


def _least_squares(is_used: tf.Tensor, y: tf.Tensor, *terms: tf.Tensor) -> tf.Tensor:
    """Return the least-squares coefficients of y in the terms, float64."""
    matrix = tf.where(is_used[:, tf.newaxis], tf.stack(terms, axis=1), 0.0)
    lengths = tf.sqrt(tf.reduce_sum(tf.square(matrix), axis=0))
    lengths = tf.where(lengths > 0.0, lengths, 1.0)
    matrix /= lengths  # scaled, so that the ridge is small for all terms
    left = tf.linalg.matmul(matrix, matrix, transpose_a=True)
    left += 1e-12 * tf.eye(len(terms), dtype=tf.float64)
    right = tf.linalg.matvec(matrix, y, transpose_a=True)
    return tf.linalg.solve(left, right[:, tf.newaxis])[:, 0] / lengths
