"""What fits of value curves share: values in descending order, the way back, what is too short.

Sorted values make a smooth curve, of which a few numbers tell enough. The order is lost then, so
that the place of every value is sent: ceil(log2 k) bits of k values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.codings.base import CodedValues, ValueCoding, used
from tf_redsync.ops import bits, wire
from tf_redsync.ops.wire import leading


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
