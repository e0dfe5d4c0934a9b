"""`Cheapest`, the shortest lossless coding of positions, and a comparison of all of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from typing_extensions import override

from tf_redsync.codings.base import Capacity, CodedPositions, IndexCoding
from tf_redsync.codings.delta import DeltaPacking
from tf_redsync.codings.elias_fano import EliasFano
from tf_redsync.codings.golomb import Golomb
from tf_redsync.codings.huffman import Huffman
from tf_redsync.codings.plain import Bitmap, RawIndices
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
    Golomb(),
    EliasFano(),
)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Lengths of the codes of some tensors' positions; `str` returns a table.

    Attributes:
        capacity: Sizes and slots.
        words: Length of the code in 32-bit words, by the name of the coding, shortest first.
        entropy: Entropy of random positions, in bits.
    """

    capacity: Capacity
    words: dict[str, int]
    entropy: float

    @property
    def best(self) -> str:
        """The name of the shortest code."""
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
        sizes: Number of elements of each tensor of a bucket.
        slots: Number of elements sent of each.

    Raises:
        ValueError: If the lists differ in length, or a tensor has more slots than elements.

    Example:
        >>> compare([1_000_000], [10_000]).best, compare([1_000], [400]).best
        ('Golomb', 'Bitmap')
        >>> print(compare([1_000_000], [10_000]))
        10000 of 1000000 elements (1 %)
        coding        bits a position  over entropy
        Golomb        8.55             +5.8 %
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
            "`slots` must have one entry per entry of `sizes`, and none above it. "
            f"Received: sizes={list(sizes)}, slots={list(slots)}"
        )
    capacity = Capacity(tuple(sizes), tuple(slots))
    # The sort is stable: at equal lengths the simpler coding, which is listed first, wins.
    words = sorted(((c.words(capacity), type(c).__name__) for c in LOSSLESS), key=lambda w: w[0])
    entropy = sum(_log2_choices(n, k) for n, k in zip(sizes, slots, strict=True))
    return Comparison(capacity, {name: n for n, name in words}, entropy)


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Cheapest(IndexCoding):
    """The shortest lossless coding of positions at the given density.

    It chooses a coding for every bucket; `compare` lists all of them.

    Lengths are static, so they are compared before anything is sent. The entropy of random
    positions is log2 of the number of ways to choose k of n elements.

    Only lengths count, not the time to code. At low densities Golomb codes win, from a density of a
    third on a bitmap. In a bucket of a few positions, the coding with the shortest header wins.

    Example:
        >>> Cheapest().of(Capacity((1_000_000,), (10_000,)))
        Golomb()
    """

    def of(self, capacity: Capacity) -> IndexCoding:
        """Return the coding for a bucket."""
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
    """Return log2 of the binomial coefficient n over k."""
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)
