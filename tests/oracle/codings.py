"""Codes of positions in plain Python, bit by bit.

Every code has `words`, the length of the longest code for any positions, and `encode(stream)`, its
int32 words. The stream has the ascending positions of the bucket's tensors, flattened one after the
other.

References: Golomb (1966), "Run-length encodings"; Elias (1974), "Efficient storage and retrieval by
content and address of static files"; Huffman (1952), "A method for the construction of
minimum-redundancy codes"; Lemire, Boytsov (2015), "Decoding billions of integers per second through
vectorization".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tests.oracle.coded import GolombStreams
from tests.oracle.quantization import to_words


def field(number: int, bits: int) -> list[int]:
    """A number in `bits` bits, lowest first."""
    assert 0 <= number < 2**bits or bits == number == 0
    return [number >> t & 1 for t in range(bits)]


def fields(numbers: Sequence[int], bits: int) -> np.ndarray:
    """Words of numbers in fields of equal width."""
    return to_words([bit for number in numbers for bit in field(int(number), bits)])


def padded(words: np.ndarray, length: int) -> np.ndarray:
    """The words, padded with zeros to a length."""
    assert len(words) <= length
    return np.concatenate([words, np.zeros(length - len(words), np.int32)])


class Code:
    """A code of the positions of a bucket.

    Args:
        sizes: Elements of each tensor.
        slots: Maximum number of positions of each tensor.
    """

    def __init__(self, sizes: Sequence[int], slots: Sequence[int]):
        self.size, self.k, self.tensors = sum(sizes), sum(slots), len(sizes)
        self.sizes, self.slots = list(sizes), list(slots)
        self.prepare()

    words: int

    def prepare(self) -> None:
        """Computes everything that does not depend on positions."""

    def encode(self, stream: np.ndarray) -> np.ndarray:
        raise NotImplementedError


class Raw(Code):
    """Words without bit packing: indices in 32 bits, and a count per tensor."""

    def prepare(self):
        self.words = self.tensors + self.k


class Bitmap(Code):
    def prepare(self):
        self.words = math.ceil(self.size / 32)

    def encode(self, stream):
        bits = np.zeros(32 * self.words, np.uint8)
        bits[stream] = 1
        return to_words(bits)


class EliasFano(Code):
    def prepare(self):
        self.low = 0
        while max(self.k, 1) * 2 ** (self.low + 1) <= self.size:
            self.low += 1
        self.high = self.k + self.size // 2**self.low
        self.words = 1 + math.ceil(self.k * self.low / 32) + math.ceil(self.high / 32)

    def encode(self, stream):
        low = [p % 2**self.low for p in stream] + [0] * (self.k - len(stream))
        high = [0] * self.high
        for i, p in enumerate(stream):
            high[p // 2**self.low + i] = 1
        return np.concatenate([np.int32([len(stream)]), fields(low, self.low), to_words(high)])


class RunLength(Code):
    def prepare(self):
        found = []
        for bits in range(1, 31):
            count = self.k + self.size // (2**bits - 1)
            found.append((count * bits, count, bits))
        _, self.count, self.bits = min(found)
        self.words = 1 + math.ceil(self.count * self.bits / 32)

    def encode(self, stream):
        longest, numbers, last = 2**self.bits - 1, [], -1
        for position in stream:
            zeros, last = int(position) - last - 1, int(position)
            while zeros >= longest:
                numbers.append(longest)
                zeros -= longest
            numbers.append(zeros)
        numbers += [longest] * (self.count - len(numbers))
        return np.concatenate([np.int32([len(stream)]), fields(numbers, self.bits)])


class Golomb(Code):
    def prepare(self):
        self.code = GolombStreams(self.sizes, self.slots)
        self.words = self.code.words

    def encode(self, stream):
        ends = np.cumsum(self.sizes)
        return self.code.encode(
            [
                stream[(stream >= end - size) & (stream < end)] - (end - size)
                for end, size in zip(ends, self.sizes, strict=True)
            ]
        )


class DeltaPacking(Code):
    """Groups of 32 gaps; the largest gap of a group determines its bits."""

    def prepare(self):
        self.groups = math.ceil(self.k / 32)
        self.capacity = self.widest()
        self.heads = math.ceil(5 * self.groups / 32)
        self.words = 1 + self.heads + self.capacity

    def widest(self):
        """Adds one bit to one group after the other, cheapest first, while gaps are left."""
        # number of elements that a single position skips
        leaps, widths = self.size - 1, [0] * self.groups
        while widths and self.size:
            least = widths.index(min(widths))
            width = widths[least] + 1
            leaps -= 2 ** (width - 1) - (2 ** (width - 2) if width > 1 else 0)
            if leaps < 0:
                break
            widths[least] = width
        return sum(widths)

    def widths(self, stream):
        gaps = (np.diff(stream, prepend=-1) - 1).tolist()
        gaps += [0] * (32 * self.groups - len(gaps))
        rows = [gaps[i : i + 32] for i in range(0, len(gaps), 32)]
        return rows, [max(row).bit_length() for row in rows]

    def encode(self, stream):
        rows, widths = self.widths(stream)
        bits = [b for row, w in zip(rows, widths, strict=True) for g in row for b in field(g, w)]
        head = [np.int32([len(stream)]), padded(fields(widths, 5), self.heads)]
        return np.concatenate([*head, padded(to_words(bits), self.capacity)])


class Huffman(Code):
    """One table for the four bytes of all indices below the bucket's size."""

    def prepare(self):
        self.codes = huffman_codes(self.size)
        lengths = np.array([len(code) for code in self.codes])
        bytes_ = np.arange(self.size, dtype="<u4").view(np.uint8).reshape(-1, 4)
        self.capacity = math.ceil(lengths[bytes_].sum(axis=1).max(initial=0) * self.k / 32)
        self.words = 1 + self.capacity

    def bits(self, position):
        return [b for t in range(4) for b in self.codes[int(position) >> 8 * t & 255]]

    def encode(self, stream):
        bits = [b for p in stream for b in self.bits(p)]
        return np.concatenate([np.int32([len(stream)]), padded(to_words(bits), self.capacity)])


def huffman_codes(size: int) -> list[list[int]]:
    """Canonical codes of the 256 bytes, the first bit first."""
    often = np.bincount(np.arange(size, dtype="<u4").view(np.uint8), minlength=256)
    least = max(1, math.ceil(4 * size / 2**13))
    trees = [(max(int(n), least), symbol, [symbol]) for symbol, n in enumerate(often)]
    lengths = [0] * 256
    while len(trees) > 1:  # merge the two rarest symbols; among equals the oldest
        trees.sort()
        (n, first, left), (m, _, right) = trees[:2]
        for symbol in left + right:
            lengths[symbol] += 1
        trees = [(n + m, first, left + right), *trees[2:]]
    codes, code, before = [[]] * 256, 0, 0
    for length, symbol in sorted(zip(lengths, range(256), strict=True)):
        code *= 2 ** (length - before)
        codes[symbol] = field(code, length)[::-1]
        code, before = code + 1, length
    return codes


# In the order of `Cheapest`: the first of equally long codes is used.
LOSSLESS = {
    "RawIndices": Raw,
    "Bitmap": Bitmap,
    "RunLength": RunLength,
    "DeltaPacking": DeltaPacking,
    "Huffman": Huffman,
    "EliasFano": EliasFano,
    "Golomb": Golomb,
}


def code_of(name: str, sizes: Sequence[int], slots: Sequence[int]) -> Code:
    """The code for a coding's name; for `Cheapest` the shortest code."""
    if name != "Cheapest":
        return LOSSLESS[name](sizes, slots)
    return min((code(sizes, slots) for code in LOSSLESS.values()), key=lambda c: c.words)
