"""DeepReduce in plain Python and numpy: Bloom filter policies, fitted curves, lengths.

Reference: Xu, Kostopoulou, Dutta, Li, Ntoulas, Kalnis (2021), "DeepReduce: A Sparse-tensor
Communication Framework for Federated Deep Learning", NeurIPS.
"""

from __future__ import annotations

import math

import numpy as np

from tests.oracle.positions import bloom_build_numpy, bloom_query_numpy, probes_numpy


class BloomFilter:
    """The filter of one tensor.

    Args:
        size: Elements of the tensor.
        slots: r, maximum number of positions.
        rate: epsilon, or None for a tenth of the density.
    """

    def __init__(self, size: int, slots: int, rate: float | None = None):
        self.size, self.slots = size, slots
        self.rate = min(max(0.1 * slots / max(size, 1), 1e-9), 0.5) if rate is None else rate
        doublings = math.log2(1 / self.rate)
        self.words = max(1, math.ceil(slots * doublings / math.log(2) / 32))
        self.hashes = min(math.ceil(doublings), 64)
        bits, throws = 32 * self.words, self.hashes * max(slots, 1)
        empty = math.exp(-throws / bits)  # expected fraction of set bits (balls into bins)
        spread = math.sqrt(max(empty - (1 + throws / bits) * empty**2, 0) / bits)
        false = (1 - empty) ** self.hashes * (size - slots)
        by_bits = false * self.hashes * spread / (1 - empty)
        capacity = slots + math.ceil(false + 6 * math.sqrt(false + by_bits**2)) + 4
        self.positives_capacity = min(capacity, size)

    def build(self, chosen: np.ndarray, seed: int) -> np.ndarray:
        """Words of the filter."""
        layout = {"words": [self.words], "hashes": [self.hashes]}
        return bloom_build_numpy([chosen], [len(chosen)], seed, **layout)

    def positives(self, words: np.ndarray, seed: int) -> list[int]:
        """P: all positives of the filter, up to the capacity."""
        layout = {"words": [self.words], "hashes": [self.hashes]}
        sizes, slots = [self.size], [self.positives_capacity]
        (at,), counts = bloom_query_numpy([words], seed, sizes=sizes, slots=slots, **layout)
        return at[0, : counts[0, 0]].tolist()

    def by_conflicts(self, positives: list[int], noise, r: int, seed: int) -> list[int]:
        """P2: one untaken element of each conflict set, smallest sets first."""
        sets: dict[int, list[int]] = {}
        for place, position in enumerate(positives):
            for bit in set(probes_numpy(position, seed, 32 * self.words, self.hashes)):
                sets.setdefault(bit, []).append(place)
        taken: list[int] = []
        for bit in sorted(sets, key=lambda b: (len(sets[b]), b)):
            left = [place for place in sets[bit] if place not in taken]
            if left and len(taken) < r:
                taken.append(min(left, key=lambda place: noise[place]))
        taken += [place for place in range(len(positives)) if place not in taken]
        return sorted(positives[place] for place in taken[:r])


DIVISORS = (100_000, 30_000, 10_000, 3_000, 1_000, 300, 100, 30, 10, 5, 1)


def segments(n: int) -> list[slice]:
    """Boundaries of the segments of n magnitudes in descending order; short segments at the end."""
    found, start = [], 0
    for divisor in DIVISORS:
        end = n // divisor
        if end - start >= 30 or divisor == 1:
            found.append(slice(start, end))
            start = end
    return [s for s in found if s.stop > s.start]


def fitted(values: np.ndarray) -> np.ndarray:
    """Values of the fitted polynomials of degree 5, in the order of `values`."""
    order = np.argsort(-values, kind="stable")
    curve = np.float64(values[order])
    result, positive = np.zeros(len(values)), int((curve > 0).sum())
    for side in (np.arange(positive), np.arange(len(values) - 1, positive - 1, -1)):
        for piece in segments(len(side)):
            at = side[piece]
            x = np.linspace(-1, 1, len(at)) if len(at) > 1 else np.array([-1.0])
            degree = min(5, len(at) - 1)
            factors = np.polynomial.chebyshev.chebfit(x, curve[at], degree)
            result[at] = np.polynomial.chebyshev.chebval(x, factors)
    values = np.zeros(len(values))
    values[order] = result
    return values


def place_bits(k: int) -> int:
    """Bits of a position in the sorted order."""
    return math.ceil(math.log2(k)) if k > 1 else 0


def polynomial_words(k: int, least: int) -> int:
    """Words of k values, or of their fit: positive count, 6 numbers per segment, places."""
    pieces = 2 * sum(k // d >= 30 or d == 1 for d in DIVISORS)
    fit = 1 + 6 * pieces + math.ceil(k * place_bits(k) / 32)
    return fit if k >= max(least, 1) and fit < k else k


def exponential_words(k: int, least: int) -> int:
    """Words of k values, or of their fit: 4 numbers, places and signs."""
    fit = 4 + math.ceil(k * (1 + place_bits(k)) / 32)
    return fit if k >= max(least, 4) and fit < k else k


def qsgd_words(k: list[int], levels: int, bucket: int) -> int:
    """Words of a flag, a norm per bucket, and a code per value."""
    bits = math.ceil(math.log2(2 * levels + 1))
    return 1 + sum(math.ceil(n / bucket) + math.ceil(n * bits / 32) for n in k)
