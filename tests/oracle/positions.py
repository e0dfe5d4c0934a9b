"""Codes of positions in plain Python: Golomb-Rice codes and Bloom filters.

Golomb (1966) codes as in Sattler et al., "Sparse Binary Compression", IJCNN 2019; Bloom filters as
in Xu et al., "DeepReduce", NeurIPS 2021.
"""

from __future__ import annotations

import numpy as np

from tests.oracle.quantization import Malformed, to_bits, to_words

MASK64 = 2**64 - 1


def unsigned(positions) -> np.ndarray:
    """Positions, of the int32 words that carry their 32 bits; those of other types as they are."""
    positions = np.asarray(positions)
    return positions.view(np.uint32) if positions.dtype == np.int32 else positions


def golomb_capacity(size: int, slots: int, rice: int) -> int:
    """Words that the positions of every choice fit."""
    return -(-(slots * (rice + 1) + ((size - slots) >> rice)) // 32)


def golomb_bits_numpy(positions, rice: int) -> list[int]:
    """The code: per gap, ones and a zero, then low bits, the lowest first."""
    bits, last = [], -1
    for position in positions:
        gap, last = int(position) - last - 1, int(position)
        bits += [1] * (gap >> rice) + [0] + [gap >> t & 1 for t in range(rice)]
    return bits


def golomb_encode_numpy(indices, counts, *, sizes, rice) -> np.ndarray:
    parts = []
    for positions, count, size, b in zip(indices, counts, sizes, rice, strict=True):
        bits = golomb_bits_numpy(unsigned(positions)[:count], b)
        words = np.zeros(golomb_capacity(size, len(positions), b), np.int32)
        words[: -(-len(bits) // 32)] = to_words(bits)
        parts += [np.array([count, len(bits)], np.int32), words]
    return np.concatenate(parts)


def golomb_decode_numpy(messages, *, sizes, slots, rice):
    """(list of positions int32 [P, slots], counts int32 [P, N]); raises Malformed.

    Positions have no sign: their bits are in the int32.
    """
    messages = np.asarray(messages, np.int32)
    indices = [np.zeros((len(messages), k), np.uint32) for k in slots]
    counts = np.zeros((len(messages), len(slots)), np.int32)
    for rank, row in enumerate(messages):
        for i, (size, k, b) in enumerate(zip(sizes, slots, rice, strict=True)):
            words = golomb_capacity(size, k, b)
            count, length, code, row = row[0], row[1], row[2 : 2 + words], row[2 + words :]
            if not 0 <= count <= k:
                raise Malformed("count")
            if not 0 <= length <= 32 * words:
                raise Malformed("bits")
            found = read_golomb(to_bits(code)[:length].tolist(), int(count), b)
            if any(p >= size for p in found):
                raise Malformed("index")
            indices[i][rank, :count], counts[rank, i] = found, count
    return [x.view(np.int32) for x in indices], counts


def read_golomb(bits: list[int], count: int, rice: int) -> list[int]:
    found, position, at = [], -1, 0
    for _ in range(count):
        gap = 0
        while at < len(bits) and bits[at]:
            gap, at = gap + 2**rice, at + 1
        if at + 1 + rice > len(bits):
            raise Malformed("bits")
        gap += sum(bit << t for t, bit in enumerate(bits[at + 1 : at + 1 + rice]))
        at, position = at + 1 + rice, position + gap + 1
        found.append(position)
    if at != len(bits):
        raise Malformed("bits")
    return found


def probes_numpy(position: int, seed: int, bits: int, hashes: int) -> list[int]:
    """The bits that a position sets in a filter."""
    h = (position + (seed % 2**32 + 1) * 0x9E3779B97F4A7C15) & MASK64
    h = ((h ^ h >> 30) * 0xBF58476D1CE4E5B9) & MASK64
    h = ((h ^ h >> 27) * 0x94D049BB133111EB) & MASK64
    h ^= h >> 31
    low, high = h % 2**32, (h >> 32) | 1
    return [((low + t * high) % 2**32 * bits) >> 32 for t in range(hashes)]


def bloom_build_numpy(indices, counts, seed: int, *, words, hashes) -> np.ndarray:
    filters = []
    for positions, count, w, h in zip(indices, counts, words, hashes, strict=True):
        bits = np.zeros(32 * w, np.uint8)
        for position in unsigned(positions)[:count]:
            bits[probes_numpy(int(position), seed, 32 * w, h)] = 1
        filters.append(to_words(bits))
    return np.concatenate(filters)


def bloom_query_numpy(filters, seed: int, *, sizes, slots, words, hashes):
    """(list of positions int32 [P, slots], counts int32 [P, N])."""
    filters = np.asarray(filters, np.int32)
    indices = [np.zeros((len(filters), k), np.int32) for k in slots]
    counts = np.zeros((len(filters), len(slots)), np.int32)
    for rank, row in enumerate(filters):
        at = 0
        for i, (size, k, w, h) in enumerate(zip(sizes, slots, words, hashes, strict=True)):
            bits, at = to_bits(row[at : at + w]), at + w
            held = [p for p in range(size) if bits[probes_numpy(p, seed, 32 * w, h)].all()][:k]
            indices[i][rank, : len(held)], counts[rank, i] = held, len(held)
    return indices, counts
