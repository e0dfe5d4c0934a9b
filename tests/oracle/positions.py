"""Codes of positions in plain Python: Golomb-Rice codes and Bloom filters.

Golomb (1966) codes as in Sattler et al., "Sparse Binary Compression", IJCNN 2019; Bloom filters as
in Xu et al., "DeepReduce", NeurIPS 2021.
"""

from __future__ import annotations

import numpy as np

from tests.oracle.quantization import Malformed, to_bits, to_words

MASK64 = 2**64 - 1


def unsigned(positions) -> np.ndarray:
    """Positions as unsigned numbers from the bits of int32 words; other types are unchanged."""
    positions = np.asarray(positions)
    return positions.view(np.uint32) if positions.dtype == np.int32 else positions


def golomb_capacity(size: int, slots: int, rice: int) -> int:
    """Words that hold any choice of positions: those of the low bits and of the bitmap."""
    return -(-slots * rice // 32) + -(-(slots + ((size - slots) >> rice)) // 32)


def golomb_bits_numpy(positions, rice: int) -> tuple[list[int], list[int]]:
    """The low bits of each gap, lowest first; and its zeros and a one in the bitmap."""
    low, bitmap, last = [], [], -1
    for position in positions:
        gap, last = int(position) - last - 1, int(position)
        low += [gap >> t & 1 for t in range(rice)]
        bitmap += [0] * (gap >> rice) + [1]
    return low, bitmap


def golomb_part_numpy(positions, size: int, slots: int, rice: int) -> np.ndarray:
    """[count, low bits, bitmap] of positions with `slots` slots."""
    low, bitmap = golomb_bits_numpy(positions, rice)
    words = np.zeros(golomb_capacity(size, slots, rice), np.int32)
    first = -(-slots * rice // 32)  # Word of the bitmap.
    for start, bits in ((0, low), (first, bitmap)):
        words[start : start + -(-len(bits) // 32)] = to_words(bits)
    return np.concatenate([np.array([len(positions)], np.int32), words])


def golomb_encode_numpy(indices, counts, *, sizes, rice) -> np.ndarray:
    return np.concatenate(
        [
            golomb_part_numpy(unsigned(positions)[:count], size, len(positions), b)
            for positions, count, size, b in zip(indices, counts, sizes, rice, strict=True)
        ]
    )


def golomb_decode_numpy(messages, *, sizes, slots, rice):
    """(list of positions int32 [P, slots], counts int32 [P, N]); raises Malformed.

    Positions are unsigned, stored as the bits of an int32.
    """
    messages = np.asarray(messages, np.int32)
    indices = [np.zeros((len(messages), k), np.uint32) for k in slots]
    counts = np.zeros((len(messages), len(slots)), np.int32)
    for rank, row in enumerate(messages):
        for i, (size, k, b) in enumerate(zip(sizes, slots, rice, strict=True)):
            words = golomb_capacity(size, k, b)
            count, code, row = row[0], row[1 : 1 + words], row[1 + words :]
            if not 0 <= count <= k:
                raise Malformed("count")
            found = read_golomb(to_bits(code).tolist(), k, int(count), b)
            if any(p >= size for p in found):
                raise Malformed("index")
            indices[i][rank, :count], counts[rank, i] = found, count
    return [x.view(np.int32) for x in indices], counts


def read_golomb(bits: list[int], slots: int, count: int, rice: int) -> list[int]:
    bitmap = bits[32 * -(-slots * rice // 32) :]
    if sum(bitmap) != count:
        raise Malformed("number of ones")
    found, position, at = [], -1, 0
    for i in range(count):
        gap = sum(bit << t for t, bit in enumerate(bits[i * rice : (i + 1) * rice]))
        while not bitmap[at]:
            gap, at = gap + 2**rice, at + 1
        at, position = at + 1, position + gap + 1
        found.append(position)
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
