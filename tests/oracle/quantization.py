"""Quantization in plain numpy: signs, two levels, ternary thresholds, QSGD, uniform, natural.

A message is [flag, scales, codes]; codes are a stream of bits, lowest bit first. Sign: Bernstein et
al., "signSGD", ICML 2018; two levels: Seide et al., "1-Bit SGD", Interspeech 2014; stochastic:
Alistarh et al., "QSGD", NeurIPS 2017, of which TernGrad is the case of one level; uniform: Zhou et
al., "DoReFa-Net", 2016; natural: Horváth et al., "Natural Compression", 2019. Random numbers:
Philox4x32-10 of Salmon et al., SC 2011.
"""

from __future__ import annotations

import numpy as np

TINY = np.finfo(np.float32).tiny  # 2^-126, the smallest normal number
RANDOM = ("stochastic", "uniform", "natural")
SCALES = {"two_level": 2, "natural": 0}  # one per bucket; others have one per tensor

# Every mode once, with levels and bucket size.
FORMATS = [
    ("sign", 1, None),
    ("two_level", 1, 32),
    ("threshold", 1, 32),
    ("stochastic", 5, 64),
    ("uniform", 10, 64),
    ("natural", 1, None),
]


class Malformed(ValueError):
    """A message that no encoder produces; the text begins with the name of the field."""


def philox_numpy(counter, key) -> np.ndarray:
    """Philox4x32-10 of counters [n, 4] with one key [2]: words uint32 [n, 4]."""
    c = [np.asarray(x, np.uint64) for x in np.asarray(counter, np.uint64).T]
    k0, k1 = (int(x) for x in key)
    mask = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        p, q = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [
            (q >> np.uint64(32)) ^ c[1] ^ np.uint64(k0), q & mask,
            (p >> np.uint64(32)) ^ c[3] ^ np.uint64(k1), p & mask,
        ]  # fmt: skip
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return np.stack(c, 1).astype(np.uint32)


def uniform_numpy(stream, tensor: int, n: int) -> np.ndarray:
    """Numbers in [0, 1) for the elements of one tensor; `stream` is (seed, worker, step)."""
    seed, worker, step = (int(x) % 2**32 for x in stream)
    block = np.arange(-(-n // 4), dtype=np.uint64)
    counter = [
        block % 2**32,
        block // 2**32,
        np.full_like(block, tensor),
        np.full_like(block, step),
    ]
    words = philox_numpy(np.stack(counter, 1), (seed, worker)).reshape(-1)[:n]
    return (words >> 8).astype(np.float32) * np.float32(2.0**-24)


def flush(x) -> np.ndarray:
    """Flushes denormals to zero, as TensorFlow's threads do."""
    x = np.asarray(x, np.float32)
    return np.where(np.abs(x) < TINY, np.float32(0), x)


def max_code(mode: str, levels: int) -> int:
    binary = {"sign": 1, "two_level": 1, "threshold": 2}
    return {**binary, "stochastic": 2 * levels, "uniform": levels, "natural": 509}[mode]


def bits_of_code(mode: str, levels: int) -> int:
    return int(np.ceil(np.log2(max_code(mode, levels) + 1)))


def to_words(bits) -> np.ndarray:
    """A stream of bits as int32 words, the first bit lowest, zeros at the end."""
    bits = np.concatenate([np.asarray(bits, np.uint8), np.zeros(-len(bits) % 32, np.uint8)])
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def to_bits(words) -> np.ndarray:
    return np.unpackbits(np.asarray(words, "<i4").view(np.uint8), bitorder="little")


def bucket_slices(n: int, bucket_size: int | None):
    """The slice of every bucket; without buckets a tensor is one slice, even if it is empty."""
    if bucket_size is None:
        return [slice(0, n)]
    return [slice(b, min(n, b + bucket_size)) for b in range(0, n, bucket_size)]


def code_numpy(x, c, mode: str, levels: int, u) -> np.ndarray:
    """Codes of one bucket with scale(s) `c`."""
    if mode in ("sign", "two_level"):
        return (x >= 0).astype(np.int64)
    if mode == "threshold":
        return 1 + (x >= c[0]).astype(np.int64) - (x <= -c[0]).astype(np.int64)
    if mode == "natural":
        return natural_code(x, u)
    s = np.float32(levels)
    if mode == "uniform":
        share = x / c[0] if c[0] > 0 else np.zeros_like(x)
        y = np.clip((share + np.float32(1)) * (s / np.float32(2)), 0, s)
        return (np.floor(y) + (u < y - np.floor(y))).astype(np.int64)
    y = np.minimum((np.abs(x) / c[0]) * s, s) if c[0] > 0 else np.zeros_like(x)
    level = np.floor(y)
    level = level + (u < y - level)
    return (levels + np.where(x < 0, -level, level)).astype(np.int64)


def natural_code(x, u) -> np.ndarray:
    """Codes of the powers of two around x. The upper one is chosen with probability (x - lower) /
    lower.

    0 and 2^-126 are neighbors. 510 means 2^128.
    """
    size = np.abs(np.float64(x))
    _, exponent = np.frexp(np.maximum(size, TINY))  # relative to twice the lower one
    low = np.where(size < TINY, 0, np.ldexp(1.0, exponent - 1))
    share = (size - low) / np.ldexp(1.0, exponent - 1)
    up = share + np.floor(np.float64(u) * 2**23) / 2**23 >= 1
    return 2 * (np.where(low > 0, exponent + 126, 0) + up) + np.signbit(x)


def value_numpy(codes, c, mode: str, levels: int) -> np.ndarray:
    """Values of the codes of one bucket."""
    if mode in ("sign", "two_level"):
        low, high = (-c[0], c[0]) if mode == "sign" else c
        return np.where(codes == 1, high, low).astype(np.float32)
    if mode == "natural":
        exponent = codes // 2 - 127
        size = np.where(codes > 1, np.ldexp(1.0, exponent), 0.0)
        return np.where(codes % 2, -size, size).astype(np.float32)
    steps = 2 * codes - levels if mode == "uniform" else codes - levels
    return steps.astype(np.float32) * (c[0] / np.float32(levels))


def quantize_numpy(tensors, scales, *, mode, levels=1, bucket_size=None, stream=(0, 0, 0)):
    """Returns (message int32 [W], errors)."""
    scales = np.asarray(scales, np.float32)
    per_bucket = SCALES.get(mode, 1)
    finite, used_scales, words, errors, at = True, [], [], [], 0
    for i, x in enumerate(tensors):
        flat = np.asarray(x, np.float32).reshape(-1)
        u, decoded = uniform_numpy(stream, i, flat.size), np.zeros_like(flat)
        codes = np.zeros(flat.size, np.int64)
        finite &= bool(np.isfinite(flat).all())
        for part in bucket_slices(flat.size, bucket_size):
            c = scales[at : at + per_bucket] if flat.size else np.zeros(per_bucket, np.float32)
            at += per_bucket
            used_scales.append(c)
            finite &= bool(np.isfinite(c).all())
            if finite:
                codes[part] = code_numpy(flat[part], c, mode, levels, u[part])
                finite &= bool((codes[part] <= max_code(mode, levels)).all())
                decoded[part] = value_numpy(codes[part], c, mode, levels)
        bits = codes[:, None] >> np.arange(bits_of_code(mode, levels)) & 1
        words.append(to_words(bits.reshape(-1)))
        with np.errstate(invalid="ignore"):
            errors.append((flat - decoded).reshape(np.shape(x)))
    head = [np.array([1], np.int32)]
    message = np.concatenate([*head, np.concatenate(used_scales).view(np.int32), *words])
    return (message if finite else np.zeros_like(message)), errors


def dequantize_sum_numpy(messages, shapes, *, mode, levels=1, bucket_size=None):
    """Sums over the messages int32 [P, W]; raises Malformed."""
    totals = [np.zeros(int(np.prod(s)), np.float32) for s in shapes]
    per_bucket, b = SCALES.get(mode, 1), bits_of_code(mode, levels)
    for row in np.asarray(messages, np.int32):
        if row[0] not in (0, 1):
            raise Malformed("flag")
        if row[0] == 0:
            continue
        scales_at, words_at = (
            1,
            1 + sum(per_bucket * len(bucket_slices(t.size, bucket_size)) for t in totals),
        )
        for total in totals:
            length = -(-total.size * b // 32)
            bits = to_bits(row[words_at : words_at + length])[: total.size * b]
            codes = bits.reshape(-1, b).astype(np.int64) @ (1 << np.arange(b))
            if (codes > max_code(mode, levels)).any():
                raise Malformed("code")
            words_at += length
            for part in bucket_slices(total.size, bucket_size):
                c = flush(row[scales_at : scales_at + per_bucket].view(np.float32))
                scales_at += per_bucket
                if total.size == 0:
                    continue
                if not np.isfinite(c).all() or (mode != "two_level" and (c < 0).any()):
                    raise Malformed("scale")
                total[part] += value_numpy(codes[part], c, mode, levels)
    return [t.reshape(s) for t, s in zip(totals, shapes, strict=True)]
