"""The sum of two exponentials, fitted to sorted magnitudes.

Xu, Kostopoulou, Dutta, Li, Ntoulas, Kalnis (2021), "DeepReduce", NeurIPS: Fit-DExp. Magnitudes in
descending order, y at x in [0, 1], are close to a e^(b x) + c e^(d x): four numbers a tensor.

The fit needs no iteration (Jean Jacquelin, 2009, "Régressions et équations intégrales"): with the
integrals S of y and SS of S, such a function fulfils

    y = -b d SS + (b + d) S + p x + q

exactly. Least squares give b + d and b d, hence b and d, and then, once more, a and c.

What is sent: a, b, c, d as float32, and for every value its place, ceil(log2 k) bits, and sign.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import tensorflow as tf

from tf_redsync import checks
from tf_redsync.codings import bits
from tf_redsync.codings.base import CodedValues, ValueCoding, used
from tf_redsync.codings.sorted_values import descending, in_place, place_bits
from tf_redsync.config import register
from tf_redsync.exchange import wire

STEEPEST = 80.0  # of b and d: e^80 is still a float32
CLOSEST = 0.1  # b and d: closer ones would need large a and c that cancel each other out


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class DoubleExponentialFit(ValueCoding):
    """Fitted exponentials: `[a, b, c, d] [places and signs]` for each tensor.

    Args:
        least: Tensors that send fewer values than so many send them as float32; and so do those
            for which the fit would be longer.

    Raises:
        ValueError: for a hyper-parameter out of its range.
    """

    least: int = 1000

    paper: ClassVar[str] = "Xu, Kostopoulou, Dutta, Li, Ntoulas, Kalnis 2021"

    def __post_init__(self) -> None:
        checks.integer("least", self.least, low=0)

    def words(self, slots: Sequence[Any]) -> Any:
        """See `ValueCoding`."""
        return sum(map(self._words, slots))

    def encode(
        self, values: Sequence[tf.Tensor], counts: tf.Tensor, stream: tf.Tensor
    ) -> CodedValues:
        """See `ValueCoding`."""
        words = []
        for tensor, count in zip(values, tf.unstack(counts), strict=True):
            k = tensor.shape[0]
            if not self._fits(k):
                words.append(wire.to_words(tensor))
                continue
            curve = descending(tf.abs(tensor), count)
            negative = tf.cast(tf.gather(tensor, curve.places) < 0, tf.int32)
            numbers = tf.cast(_fit(curve.values, count), tf.float32)
            words += [
                wire.to_words(numbers),
                bits.packed(2 * curve.places + negative, 1 + place_bits(k)),
            ]
        code = tf.concat(words, axis=0)
        slots = [v.shape[0] for v in values]
        sent = self.decode(code[tf.newaxis], counts[tf.newaxis], slots)
        return CodedValues(code, [v[0] for v in sent])

    def decode(self, words: tf.Tensor, counts: tf.Tensor, slots: Sequence[Any]) -> list[tf.Tensor]:
        """See `ValueCoding`."""
        values = []
        for i, (k, part) in enumerate(
            zip(slots, tf.split(words, list(map(self._words, slots)), axis=1), strict=True)
        ):
            if not self._fits(k):
                values.append(used(wire.from_words(part), counts[:, i : i + 1]))
                continue
            count = counts[:, i : i + 1]
            numbers = tf.cast(wire.from_words(part[:, :4]), tf.float64)
            a, b, c, d = tf.split(numbers, 4, axis=1)
            x = _places(k, count)
            curve = tf.maximum(a * tf.exp(b * x) + c * tf.exp(d * x), 0.0)
            curve = used(tf.cast(curve, tf.float32), count)
            codes = bits.unpacked(part[:, 4:], 1 + place_bits(k), k)
            signed = tf.where(codes % 2 == 1, -curve, curve)
            values.append(in_place(signed, codes // 2))
        return values

    def _fits(self, k: int) -> bool:
        """Whether k values are fitted."""
        return k >= max(self.least, 4) and _words_of_fit(k) < k

    def _words(self, k: int) -> int:
        return _words_of_fit(k) if self._fits(k) else k


def _words_of_fit(k: int) -> int:
    return 4 + bits.packed_words(k, 1 + place_bits(k))


def _places(k: int, count: tf.Tensor) -> tf.Tensor:
    """X of every value, float64: 0 for the first, 1 for the last one that is used."""
    return tf.cast(tf.range(k), tf.float64) / tf.cast(tf.maximum(count - 1, 1), tf.float64)


def _fit(y: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """Return a, b, c, d for float64 `[k]`, of which the first `count` are used; float64 `[4]`."""
    k = y.shape[0]
    x, is_used = _places(k, count), tf.range(k) < count
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
