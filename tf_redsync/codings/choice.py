"""The cheapest lossless coding of positions for the density at hand, and why."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from typing_extensions import override

from tf_redsync.codings.base import Capacity, CodedPositions, IndexCoding
from tf_redsync.codings.bitmap import Bitmap
from tf_redsync.codings.delta import DeltaPacking
from tf_redsync.codings.elias_fano import EliasFano
from tf_redsync.codings.golomb import Golomb
from tf_redsync.codings.huffman import Huffman
from tf_redsync.codings.plain import RawIndices
from tf_redsync.codings.run_length import RunLength
from tf_redsync.config import register
from tf_redsync.ops.codecs import Positions
from tf_redsync.tables import aligned

LOSSLESS: tuple[IndexCoding, ...] = (
    RawIndices(),
    Bitmap(),
    RunLength(),
    DeltaPacking(),
    Huffman(),
    EliasFano(),
    Golomb(),
)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Codings of the positions of some tensors; `str` prints a table.

    Attributes:
        capacity: Sizes and slots.
        words: Length of the code in 32-bit words, by the name of the coding, shortest first.
        entropy: Bits that random positions need at least.
    """

    capacity: Capacity
    words: dict[str, int]
    entropy: float

    @property
    def best(self) -> str:
        """Name of the shortest code."""
        return next(iter(self.words))

    @override
    def __str__(self) -> str:
        k = max(sum(self.capacity.slots), 1)
        lines = [("coding", "bits a position", "over entropy")]
        for name, words in self.words.items():
            over = 32 * words / self.entropy - 1 if self.entropy else math.inf
            lines.append((name, f"{32 * words / k:.2f}", f"{100 * over:+.1f} %"))
        lines.append(("entropy", f"{self.entropy / k:.2f}", ""))
        slots, size = sum(self.capacity.slots), sum(self.capacity.sizes)
        head = f"{slots} of {size} elements ({100 * slots / max(size, 1):.3g} %)"
        return "\n".join([head, *aligned(lines)])


def compare(sizes: Sequence[int], slots: Sequence[int]) -> Comparison:
    """Compare all lossless codings of positions.

    Args:
        sizes: Elements of each tensor of a bucket.
        slots: How many of each are sent.

    Raises:
        ValueError: for lists of different lengths, or more slots than elements.

    Example:
        >>> compare([1_000_000], [10_000]).best, compare([1_000], [400]).best
        ('Golomb', 'Bitmap')
        >>> print(compare([1_000_000], [10_000]))
        10000 of 1000000 elements (1 %)
        coding        bits a position  over entropy
        Golomb        8.55             +5.9 %
        EliasFano     8.57             +6.0 %
        RunLength     10.76            +33.3 %
        DeltaPacking  12.74            +57.7 %
        Huffman       27.00            +234.3 %
        RawIndices    32.00            +296.2 %
        Bitmap        100.00           +1137.9 %
        entropy       8.08
    """
    if len(sizes) != len(slots) or any(not 0 <= k <= n for k, n in zip(slots, sizes, strict=False)):
        raise ValueError(
            "`slots` must have one entry for each of `sizes`, of at most as many elements. "
            f"Received: sizes={list(sizes)}, slots={list(slots)}"
        )
    capacity = Capacity(tuple(sizes), tuple(slots))
    # Of equal lengths the one that stands first in the list: the simpler one.
    words = sorted(((c.words(capacity), type(c).__name__) for c in LOSSLESS), key=lambda w: w[0])
    entropy = sum(_log2_choices(n, k) for n, k in zip(sizes, slots, strict=True))
    return Comparison(capacity, {name: n for n, name in words}, entropy)


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Cheapest(IndexCoding):
    """The cheapest lossless coding of positions for the density at hand, and why.

    For every bucket the shortest of the lossless codings; `compare` shows them all.

    Lengths are static, so they can be compared before anything is sent. What random positions need
    at least is log2 of the number of ways to choose k of n elements.

    Lengths are compared and nothing else: at low densities Golomb codes win, or those of Elias and
    Fano by a word, from a third on a bitmap does, and in a bucket of a few positions whatever has
    the shortest head.

    Example:
        >>> Cheapest().of(Capacity((1_000_000,), (10_000,)))
        Golomb()
    """

    def of(self, capacity: Capacity) -> IndexCoding:
        """Return the coding that is used."""
        best = compare(capacity.sizes, capacity.slots).best
        return next(c for c in LOSSLESS if type(c).__name__ == best)

    @override
    def words(self, capacity: Capacity) -> Any:
        return self.of(capacity).words(capacity)

    @override
    def encode(
        self, indices: Sequence[tf.Tensor], counts: tf.Tensor, capacity: Capacity, seed: tf.Tensor
    ) -> CodedPositions:
        return self.of(capacity).encode(indices, counts, capacity, seed)

    @override
    def decode(self, words: tf.Tensor, capacity: Capacity, seed: tf.Tensor) -> Positions:
        return self.of(capacity).decode(words, capacity, seed)


def _log2_choices(n: int, k: int) -> float:
    """Log2 of n over k."""
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)
