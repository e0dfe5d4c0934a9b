"""The sum of two exponentials, fitted to sorted magnitudes."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import tensorflow as tf
from typing_extensions import override

from tf_redsync.codings.base import used
from tf_redsync.config import register
from tf_redsync.contrib.codings.sorted_values import (
    FittedCurve,
    descending,
    in_place,
    place_bits,
)
from tf_redsync.ops import bits, wire
from tf_redsync.ops.wire import leading

STEEPEST = 80.0  # of b and d: e^80 is still a float32
CLOSEST = 0.1  # b and d: closer ones would need large a and c that cancel each other out


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
        numbers = tf.cast(_fit(curve.values, count), tf.float32)
        code = bits.packed(2 * curve.places + negative, 1 + place_bits(values.shape[0]))
        return [wire.to_words(numbers), code]

    @override
    def fitted(self, words: tf.Tensor, count: tf.Tensor, k: int) -> tf.Tensor:
        numbers = tf.cast(wire.from_words(words[:, :4]), tf.float64)
        a, b, c, d = tf.split(numbers, 4, axis=1)
        x = _places(k, count)
        curve = tf.maximum(a * tf.exp(b * x) + c * tf.exp(d * x), 0.0)
        curve = used(tf.cast(curve, tf.float32), count)
        codes = bits.unpacked(words[:, 4:], 1 + place_bits(k), k)
        return in_place(tf.where(codes % 2 == 1, -curve, curve), codes // 2)


def _places(k: int, count: tf.Tensor) -> tf.Tensor:
    """X of every value, float64: 0 for the first, 1 for the last one that is used."""
    return tf.cast(tf.range(k), tf.float64) / tf.cast(tf.maximum(count - 1, 1), tf.float64)


def _fit(y: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """Return a, b, c, d for float64 `[k]`, of which the first `count` are used; float64 `[4]`."""
    k = y.shape[0]
    x, is_used = _places(k, count), leading(count, k)
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
