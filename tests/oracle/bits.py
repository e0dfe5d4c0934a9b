"""Bit packing by numpy's packbits, and Rice codes bit by bit in plain Python.

Rice (1979), "Some practical universal noiseless coding techniques"; the low bits of all numbers
come before the unary parts.
"""

from __future__ import annotations

import math

import numpy as np

from tests.oracle.quantization import Malformed, to_bits, to_words


def low_bits(code: int, bits: int) -> list[int]:
    return [int(code) >> t & 1 for t in range(bits)]


def pack_numpy(codes, bits: int) -> np.ndarray:
    """Words of codes `[..., count]`."""
    codes = np.asarray(codes)
    each = (codes[..., np.newaxis].astype(np.int64) >> np.arange(bits)) & 1
    rows = each.reshape(math.prod(codes.shape[:-1]), codes.shape[-1] * bits)
    words = -(-codes.shape[-1] * bits // 32)
    out = np.zeros((len(rows), words), np.int32)
    for row, of_row in zip(out, rows, strict=True):
        row[:] = to_words(of_row)
    return out.reshape(*codes.shape[:-1], words)


def unpack_numpy(words, bits: int, count: int) -> np.ndarray:
    """Codes `[rows, count]` of words `[rows, words]`."""
    out = np.zeros((len(words), count), np.int64)
    for row, of_row in zip(out, words, strict=True):
        each = to_bits(of_row)[: count * bits].reshape(count, bits).astype(np.int64)
        row[:] = (each << np.arange(bits)).sum(axis=1)
    return out.astype(np.uint32).view(np.int32)


def write_numpy(codes, lengths, words: int) -> np.ndarray:
    """Words of variable-length codes, padded to `words` words."""
    bits = []
    for code, length in zip(codes, lengths, strict=True):
        if not 0 <= length <= 32:
            raise Malformed("length")
        bits += low_bits(code, length)
    bits = bits[: 32 * words]
    return to_words(bits + [0] * (32 * words - len(bits)))


def bitmap_numpy(positions, count: int, words: int) -> np.ndarray:
    """Words in which the bits at the first `count` positions are set."""
    if not 0 <= count <= len(positions):
        raise Malformed("count")
    bits = np.zeros(32 * words, np.uint8)
    used = np.asarray(positions, np.int64)[:count]
    if ((used < 0) | (used >= bits.size)).any() or (np.diff(used) <= 0).any():
        raise Malformed("index")
    bits[used] = 1
    return to_words(bits)


def set_bits_numpy(words, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions `[rows, slots]` and counts `[rows, 1]` of the set bits."""
    found = np.zeros((len(words), slots), np.int32)
    counts = np.zeros((len(words), 1), np.int32)
    for row, count, of_row in zip(found, counts, words, strict=True):
        places = np.flatnonzero(to_bits(of_row))
        row[: len(places)] = places[:slots]
        count[0] = len(places)
    return found, counts


def rice_encode_numpy(numbers, rice: int, bitmap_words: int) -> np.ndarray:
    """Low bits, then the unary parts."""
    low, unary = [], []
    for x in np.asarray(numbers).tolist():
        z = 2 * x if x >= 0 else -2 * x - 1
        if (z >> rice) + 1 + len(unary) > 32 * bitmap_words:
            raise Malformed("length")
        low += low_bits(z, rice)
        unary += [0] * (z >> rice) + [1]
    bitmap = np.zeros(32 * bitmap_words, np.uint8)
    bitmap[: len(unary)] = unary
    return np.concatenate([to_words(low), to_words(bitmap)])


def rice_decode_numpy(codes, rice: int, bitmap_words: int, count: int) -> np.ndarray:
    """Numbers `[rows, count]`."""
    out = np.zeros((len(codes), count), np.int32)
    low_words = -(-count * rice // 32)
    for row, code in zip(out, codes, strict=True):
        ones = np.flatnonzero(to_bits(code[low_words:]))
        if len(ones) == 0:
            continue
        if len(ones) != count:
            raise Malformed("number of ones")
        low, before = to_bits(code[:low_words]), -1
        for i, one in enumerate(ones.tolist()):
            z = one - before - 1 << rice
            z += sum(int(low[i * rice + t]) << t for t in range(rice))
            if z >= 2**32:
                raise Malformed("number of zeros")
            row[i], before = -(z + 1) // 2 if z % 2 else z // 2, one
    return out
