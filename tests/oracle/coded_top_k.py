"""Exact top-k with Golomb-coded positions and signed conditional means, in plain numpy.

Reference: Sattler, Wiedemann, Müller, Samek (2020), "Robust and Communication-Efficient Federated
Learning from Non-IID Data", algorithm 1 and "sparse ternary compression"; the selection is that of
`tests/oracle/redsync.py`.
"""

from __future__ import annotations

import math

import numpy as np

from tests.oracle import sparse
from tests.oracle.coded import GolombStreams
from tests.oracle.positions import read_golomb
from tests.oracle.quantization import Malformed, flush, to_bits, to_words
from tests.oracle.redsync import accumulate_and_select_numpy

UNITS = 31  # magnitudes are multiples of 2^-31 of the power of two above the largest one


def mean_numpy(magnitudes, exponent: int) -> np.float32:
    """Mean of magnitudes below 2^exponent, each rounded down; 0 without magnitudes."""
    if len(magnitudes) == 0:
        return np.float32(0)
    total = sum(int(math.ldexp(a, UNITS - exponent)) for a in magnitudes.tolist())
    return np.float32(total / len(magnitudes) * 2.0 ** (exponent - UNITS))


def conditional_means_numpy(values, bits: int):
    """(magnitudes float32 [2^(bits - 1)], code of each value): halves split at their means."""
    magnitudes = np.abs(np.asarray(values, np.float32))
    exponent = math.frexp(magnitudes.max(initial=np.float32(0)))[1]
    sets = [np.arange(magnitudes.size)]
    for _ in range(bits - 1):
        halves = []
        for members in sets:
            inside = magnitudes[members]
            above = inside > mean_numpy(inside, exponent)
            halves += [members[~above], members[above]]
        sets = halves
    levels = np.array([mean_numpy(magnitudes[s], exponent) for s in sets], np.float32)
    number = np.zeros(magnitudes.size, np.int64)
    for n, members in enumerate(sets):
        number[members] = n
    return levels, number


def bfloat16_numpy(values) -> np.ndarray:
    """The nearest bfloat16, ties to even, as uint32 with 16 low bits."""
    words = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((words + 0x7FFF + (words >> 16 & 1)) >> 16).astype(np.uint32)


def from_bfloat16(halves) -> np.ndarray:
    return (np.asarray(halves, np.uint32) << 16).view(np.float32)


def value_words(slots, bits: int) -> int:
    """Words of the values: magnitudes and codes, or bfloat16 values."""
    if bits == 16:
        return sum(-(-k // 2) for k in slots)
    return len(slots) * 2 ** (bits - 1) + -(-sum(slots) * bits // 32)


def message_words(sizes, slots, bits: int) -> int:
    """A flag, positions, values."""
    return 1 + GolombStreams(sizes, slots).words + value_words(slots, bits)


def code_values_numpy(values, slots, bits: int):
    """(words, transmitted values of each tensor) for the selected values of every tensor."""
    if bits == 16:
        halves = [bfloat16_numpy(v) for v in values]
        words = []
        for half, k in zip(halves, slots, strict=True):
            padded = np.zeros(k + k % 2, np.uint16)
            padded[: half.size] = half
            words.append(padded.view("<i4").astype(np.int32))
        return np.concatenate([np.zeros(0, np.int32), *words]), [from_bfloat16(h) for h in halves]
    heads, stream, sent = [], [], []
    for v, k in zip(values, slots, strict=True):
        levels, number = conditional_means_numpy(v, bits)
        codes = np.zeros(k, np.int64)
        codes[: v.size] = 2 * number + (v < 0)
        heads.append(levels.view(np.int32))
        stream.append((codes[:, None] >> np.arange(bits) & 1).reshape(-1))
        sent.append(np.where(v < 0, -levels[number], levels[number]).astype(np.float32))
    return np.concatenate([*heads, to_words(np.concatenate(stream))]), sent


def select_and_code_numpy(grads, residuals, velocities, k, *, value_bits, **options):
    """(message int32 [W], residuals, velocities, positions and transmitted values)."""
    n = len(grads)
    form = {"selectors": ["exact"] * n, "quantized": [False] * n}
    plain, v, u, _ = accumulate_and_select_numpy(
        grads, residuals, velocities, k, [-1] * n, **form, **options
    )
    sizes, slots = [np.size(g) for g in grads], [int(x) for x in k]
    if plain[0] == 0:
        return np.zeros(message_words(sizes, slots, value_bits), np.int32), v, u, None
    chosen, at = [], 1
    for slot in slots:
        count = plain[at]
        index = plain[at + 1 : at + 1 + count].astype(np.int64)
        value = plain[at + 1 + slot : at + 1 + slot + count].view(np.float32)
        chosen.append((index, value))
        at += 1 + 2 * slot
    positions = GolombStreams(sizes, slots).encode([index for index, _ in chosen])
    words, sent = code_values_numpy([value for _, value in chosen], slots, value_bits)
    message = np.concatenate([np.int32([1]), positions, words])
    out = []
    for residual, (index, value), q in zip(v, chosen, sent, strict=True):
        flat = residual.reshape(-1).copy()
        flat[index] = value - q
        out.append(flat.reshape(residual.shape))
    if not all(np.isfinite(q).all() for q in sent):
        return np.zeros_like(message), v, u, None
    return message, out, u, [(index, q) for (index, _), q in zip(chosen, sent, strict=True)]


def decode_numpy(messages, shapes, k, value_bits: int) -> list[np.ndarray]:
    """Sums over the messages int32 [P, W]; raises Malformed."""
    sizes, slots = [int(np.prod(s)) for s in shapes], [int(x) for x in k]
    code = GolombStreams(sizes, slots)
    totals = [np.zeros(n, np.float32) for n in sizes]
    rows = [(row, read_positions(row[1:], code)) for row in np.asarray(messages, np.int32)]
    for row, chosen in rows:
        if row[0] not in (0, 1):
            raise Malformed("flag")
        values = read_values(row[1 + code.words :], slots, value_bits)
        for i, total in enumerate(totals):
            index = chosen[i]
            if row[0] == 0:
                continue
            if index.size > slots[i]:
                raise Malformed("count")
            value = values[i][: index.size]
            if not np.isfinite(value).all():
                raise Malformed("value")
            total[index] += flush(value)
    return [t.reshape(s) for t, s in zip(totals, shapes, strict=True)]


def read_positions(words, code: GolombStreams) -> dict[int, np.ndarray]:
    """Positions in each tensor."""
    chosen = {}
    for members, b in zip(code.members, code.b, strict=True):
        size, k = code.total(members)
        length = code.part_words(members)
        count, part, words = words[0], words[1:length], words[length:]
        if not 0 <= count <= k:
            raise Malformed("count")
        at = np.array(read_golomb(to_bits(part).tolist(), k, int(count), b), np.int64)
        if (at >= size).any():
            raise Malformed("index")
        end = 0
        for i in members:
            start, end = end, end + code.sizes[i]
            chosen[i] = at[(at >= start) & (at < end)] - start
    return chosen


def read_values(words, slots, bits: int) -> list[np.ndarray]:
    """The values in all slots of every tensor."""
    values, at = [], 0
    if bits == 16:
        for k in slots:
            length = -(-k // 2)
            values.append(from_bfloat16(words[at : at + length].view(np.uint16)[:k]))
            at += length
        return values
    heads = len(slots) * 2 ** (bits - 1)
    levels = words[:heads].view(np.float32).reshape(len(slots), -1)
    stream = to_bits(words[heads:])[: sum(slots) * bits].reshape(-1, bits).astype(np.int64)
    codes = stream @ (1 << np.arange(bits))
    for k, of_tensor in zip(slots, levels, strict=True):
        own, codes = codes[:k], codes[k:]
        values.append(np.where(own & 1, -of_tensor[own >> 1], of_tensor[own >> 1]))
    return values


class CodedTopKOracle:
    """Workers that send coded top-k messages and keep the rest.

    Args:
        shapes: Shapes of the tensors.
        workers: Number of workers.
        density: Fraction of each tensor that is sent, or one for each tensor.
        value_bits: Bits of a value; 16 means bfloat16.
        options: `momentum`, `nesterov`, `masking`.
    """

    def __init__(self, shapes, workers, density, value_bits, **options):
        self.shapes, self.value_bits, self.options = list(shapes), value_bits, options
        sizes = [int(np.prod(s)) for s in shapes]
        densities = np.broadcast_to(density, [len(sizes)])
        self.k = [sparse.count(d, n) for d, n in zip(densities, sizes, strict=True)]
        self.residuals = [[np.zeros(s, np.float32) for s in shapes] for _ in range(workers)]
        self.velocities = [
            [np.zeros(s, np.float32) for s in shapes] if options.get("momentum") else []
            for _ in range(workers)
        ]

    def step(self, grads) -> list[np.ndarray]:
        """Runs one step on `grads[worker][tensor]`; returns the totals."""
        totals = [np.zeros(int(np.prod(s)), np.float32) for s in self.shapes]
        for worker, own in enumerate(grads):
            _, self.residuals[worker], self.velocities[worker], sent = select_and_code_numpy(
                own, self.residuals[worker], self.velocities[worker], self.k,
                value_bits=self.value_bits, **self.options,
            )  # fmt: skip
            for total, (index, value) in zip(totals, sent, strict=True):
                total[index] += value
        return [t.reshape(s) for t, s in zip(totals, self.shapes, strict=True)]


class CodedGMCOracle:
    """Workers that add global momentum, a share each of the last total, before they select.

    Shi, Zhao, Xie, Gao, Li (2019), "Global Momentum Compression", in the units of an exchange, as
    `tests/oracle/gmc.py` derives them: a = v + (g / K + beta / K before).
    """

    def __init__(self, shapes, workers, density, value_bits, momentum):
        self.top_k = CodedTopKOracle(shapes, workers, density, value_bits)
        self.share = np.float32(momentum / workers)
        self.before = [np.zeros(s, np.float32) for s in shapes]

    @property
    def residuals(self):
        """Includes the share of the last total, which the next step adds."""
        return [
            [v + self.share * b for v, b in zip(own, self.before, strict=True)]
            for own in self.top_k.residuals
        ]

    def follow(self, states) -> None:
        """Continues from the state of float32 workers, where near ties round differently."""
        self.top_k.residuals = [
            [np.array(r) - self.share * b for r, b in zip(s["residual"], self.before, strict=True)]
            for s in states
        ]

    def step(self, grads) -> list[np.ndarray]:
        """Runs one step on `grads[worker][tensor]`, which are g / K; returns the totals."""
        own = [[self.share * b + g for g, b in zip(gs, self.before, strict=True)] for gs in grads]
        self.before = self.top_k.step(own)
        return self.before


class CodedAdamOracle:
    """Workers that send their own Adam updates in coded top-k messages and keep the rest.

    Chen, Shen, Huang, Liu (2021), "Quantized Adam with Error Feedback", without momentum and in
    units of the learning rate; Kingma, Ba (2015), "Adam", algorithm 1, for the correction of the
    bias. The squared gradients have the factor `workers`. In updates those of the same step have
    the factor `own`, except in the first step.
    """

    def __init__(self, shapes, workers, density, value_bits, beta_2, epsilon, own):
        self.top_k = CodedTopKOracle(shapes, workers, density, value_bits)
        self.beta_2, self.epsilon, self.workers, self.t = beta_2, epsilon, workers, 0
        self.own = own
        self.moments = [[np.zeros(s) for s in shapes] for _ in range(workers)]

    @property
    def residuals(self):
        return self.top_k.residuals

    def follow(self, states) -> None:
        """Continues from the state of float32 workers, where near ties round differently."""
        self.top_k.residuals = [[np.array(r) for r in s["residual"]] for s in states]

    def step(self, grads) -> list[np.ndarray]:
        """Runs one step on `grads[worker][tensor]`, which are g / K; returns the totals."""
        self.t += 1
        factor = self.workers if self.t == 1 else self.own
        updates = []
        for own, moments in zip(grads, self.moments, strict=True):
            updates.append([])
            for g, s in zip(own, moments, strict=True):
                s *= self.beta_2
                square = (1 - self.beta_2) * np.float64(g) ** 2
                root = np.sqrt((s + factor * square) / (1 - self.beta_2**self.t))
                s += self.workers * square
                updates[-1].append(np.float32(g / (root + self.epsilon)))
        return self.top_k.step(updates)
