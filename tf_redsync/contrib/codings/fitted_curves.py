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

DIVISORS = (100_000, 30_000, 10_000, 3_000, 1_000, 300, 100, 30, 10, 5, 1)  # of N, ends of segments
SHORTEST = 30  # values
COEFFICIENTS = 6

STEEPEST = 80.0  # of b and d: e^80 is still a float32
CLOSEST = 0.1  # b and d: closer ones would need large a and c that cancel each other out


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
        places: int32 `[workers, slots]`; those out of range are left out, as no encoder makes any.
    """
    workers, slots = values.shape[0], values.shape[1]
    row = tf.repeat(tf.range(workers), slots)
    at = tf.stack([row, tf.minimum(tf.reshape(places, [-1]), slots)], axis=1)
    return tf.scatter_nd(at, tf.reshape(values, [-1]), [workers, slots + 1])[:, :slots]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FittedCurve(ValueCoding):
    """A fit of every tensor's values by itself.

    Args:
        least: Tensors that send fewer values than so many send them as float32; and so do those
            for which the fit would be longer.
    """

    least: int = 1000

    FEWEST: ClassVar[int] = 1  # values that can be fitted
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
        """Return the values of fits.

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
        """Whether k values are fitted."""
        return k >= max(self.least, self.FEWEST) and self.fit_words(k) < k

    def _words(self, k: int) -> int:
        return self.fit_words(k) if self._fits(k) else k


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


def _fit_polynomials(curve: tf.Tensor, count: tf.Tensor, positive: tf.Tensor) -> tf.Tensor:
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


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class DoubleExponentialFit(FittedCurve):
    """The sum of two exponentials, fitted to sorted magnitudes.

    Fitted exponentials: `[a, b, c, d] [places and signs]` for each tensor.

    Xu, Kostopoulou, Dutta, Li, Ntoulas, Kalnis (2021), "DeepReduce", NeurIPS: Fit-DExp. Magnitudes
    in descending order, y at x in [0, 1], are close to a e^(b x) + c e^(d x): four numbers a
    tensor.

    The fit needs no iteration (Jean Jacquelin, 2009, "Régressions et équations intégrales"): with
    the integrals S of y and SS of S, such a function fulfils

        y = -b d SS + (b + d) S + p x + q

    exactly. Least squares give b + d and b d, hence b and d, and then, once more, a and c.

    What is sent: a, b, c, d as float32, and for every value its place, ceil(log2 k) bits, and sign.

    Args:
        least: Tensors that send fewer values than so many send them as float32; and so do those
            for which the fit would be longer.

    Raises:
        ValueError: for a hyper-parameter out of its range.
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
    """X of every value, float64: 0 for the first, 1 for the last one that is used."""
    return tf.cast(tf.range(k), tf.float64) / tf.cast(tf.maximum(count - 1, 1), tf.float64)


def _fit_exponentials(y: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """Return a, b, c, d for float64 `[k]`, of which the first `count` are used; float64 `[4]`."""
    k = y.shape[0]
    x, is_used = _abscissae(k, count), leading(count, k)
    scale = tf.maximum(tf.reduce_max(y), 1e-300)
    y = tf.where(is_used, y / scale, 0.0)
    s = _integral(x, y)
    ss = _integral(x, s)
    one = tf.ones_like(x)
    product, total = tf.unstack(_least_squares(is_used, y, ss, s, x, one)[:2])
    root = tf.sqrt(tf.maximum(total * total + 4.0 * product, CLOSEST**2))
    b = tf.clip_by_value((total + root) / 2.0, -STEEPEST, STEEPEST)
    d = tf.clip_by_value((total - root) / 2.0, -STEEPEST, STEEPEST)
    a, c = tf.unstack(_least_squares(is_used, y, tf.exp(b * x), tf.exp(d * x)))
    return tf.stack([a * scale, b, c * scale, d])


def _integral(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Integral of y from the first x on, by trapezoids."""
    areas = 0.5 * (y[1:] + y[:-1]) * (x[1:] - x[:-1])
    return tf.concat([[0.0], tf.cumsum(areas)], axis=0)


def _least_squares(is_used: tf.Tensor, y: tf.Tensor, *terms: tf.Tensor) -> tf.Tensor:
    """Factors of the terms whose sum is closest to y, float64."""
    matrix = tf.where(is_used[:, tf.newaxis], tf.stack(terms, axis=1), 0.0)
    lengths = tf.sqrt(tf.reduce_sum(tf.square(matrix), axis=0))
    lengths = tf.where(lengths > 0.0, lengths, 1.0)
    matrix /= lengths  # else the ridge would be more than the shorter ones
    left = tf.linalg.matmul(matrix, matrix, transpose_a=True)
    left += 1e-12 * tf.eye(len(terms), dtype=tf.float64)
    right = tf.linalg.matvec(matrix, y, transpose_a=True)
    return tf.linalg.solve(left, right[:, tf.newaxis])[:, 0] / lengths
