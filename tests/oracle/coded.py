"""Golomb codes of a bucket that never overflow, in plain Python.

k positions below n skip n - k elements in all. The longest code has one gap that skips all of them:
the sum of (d - 1) >> b over the gaps d is at most that of their sum. Each stream's b minimizes the
longest code.

Tensors are divided into streams by the b that each would get alone, with neighbors merged if that
shortens the message. Of equally short divisions, the one with the longest last stream is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from tests.oracle.positions import golomb_part_numpy


def longest_bits(n: int, k: int, b: int) -> tuple[int, int]:
    """Bits of the low parts of k positions below n, and of their bitmap."""
    gaps = [n - k + 1] + [1] * (k - 1) if k else []
    return k * b, sum(((d - 1) >> b) + 1 for d in gaps)


def best_parameter(n: int, k: int) -> int:
    """The smallest b that minimizes the longest code."""
    lengths = [sum(longest_bits(n, k, b)) for b in range(31)]
    return lengths.index(min(lengths))


class GolombStreams:
    """The code of the positions of a bucket.

    Args:
        sizes: Elements of each tensor.
        k: Maximum number of positions of each tensor.

    Attributes:
        members: Numbers of the tensors of each stream.
        b: Parameter of each stream.
        words: Words of the codes with their counts.
    """

    def __init__(self, sizes: Sequence[int], k: Sequence[int]):
        self.sizes, self.k = list(sizes), list(k)
        alone = [best_parameter(n, m) for n, m in zip(sizes, k, strict=True)]
        levels = sorted(set(alone))
        divisions = []
        for cuts in itertools.product((False, True), repeat=len(levels) - 1):
            starts = [0, *(i + 1 for i, cut in enumerate(cuts) if cut)]
            ends = [*starts[1:], len(levels)]
            members = [
                [i for i, b in enumerate(alone) if b in levels[start:end]]
                for start, end in zip(starts, ends, strict=True)
            ]
            divisions.append((sum(map(self.part_words, members)), starts[::-1], members))
        self.words, _, self.members = min(divisions)
        self.b = [self.parameter(m) for m in self.members]

    def total(self, members: Sequence[int]) -> tuple[int, int]:
        """Number of elements and positions of a stream."""
        return sum(self.sizes[i] for i in members), sum(self.k[i] for i in members)

    def parameter(self, members: Sequence[int]) -> int:
        return best_parameter(*self.total(members))

    def part_words(self, members: Sequence[int]) -> int:
        """Words of a count, the longest low bits and the bitmap, rounded up to whole words each."""
        low, bitmap = longest_bits(*self.total(members), self.parameter(members))
        return 1 + -(-low // 32) + -(-bitmap // 32)

    def streams(self, chosen: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Positions in each stream, from ascending positions in each tensor."""
        found = []
        for members in self.members:
            starts = np.cumsum([0, *(self.sizes[i] for i in members)])[:-1]
            parts = [np.int64(chosen[i]) + s for i, s in zip(members, starts, strict=True)]
            found.append(np.concatenate(parts))
        return found

    def encode(self, chosen: Sequence[np.ndarray]) -> np.ndarray:
        """The words of all codes."""
        words = []
        for members, b, stream in zip(self.members, self.b, self.streams(chosen), strict=True):
            words.append(golomb_part_numpy(stream, *self.total(members), b))
        return np.concatenate(words)
