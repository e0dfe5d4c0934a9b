"""Unbiased compressors in plain numpy, given their random numbers.

References: Horváth, Ho, Horváth, Sahu, Canini, Richtárik (2019), "Natural Compression for
Distributed Deep Learning"; Zhou, Wu, Ni, Zhou, Wen, Zou (2016), "DoReFa-Net"; Wangni, Wang, Liu,
Zhang (2018), "Gradient Sparsification for Communication-Efficient Distributed Optimization"; Zhang,
Chen, Mokhtari, Hassani, Karbasi (2020), "Quantized Frank-Wolfe".
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.oracle.quantization import code_numpy, uniform_numpy, value_numpy

MODE = "stochastic"  # mode of Quantized Frank-Wolfe


class _Sum:
    """Sums the workers' messages; `sent(worker, tensors)` returns one vector per tensor."""

    residuals = None

    def __init__(self, shapes):
        self.shapes, self.iteration = list(shapes), 0

    def step(self, grads) -> list[np.ndarray]:
        """Runs one step on `grads[worker][tensor]`; returns the totals."""
        totals = [np.zeros(int(np.prod(s)), np.float32) for s in self.shapes]
        for worker, own in enumerate(grads):
            sent = self.sent(worker, [np.ravel(g) for g in own])
            for total, part in zip(totals, sent, strict=True):
                total += part
        self.iteration += 1
        return [t.reshape(s) for t, s in zip(totals, self.shapes, strict=True)]

    def sent(self, worker: int, tensors) -> list[np.ndarray]:
        raise NotImplementedError


class RoundedOracle(_Sum):
    """Stochastic rounding; each tensor's scale is its largest magnitude.

    Args:
        shapes: Shapes of the tensors.
        streams: `streams(step, worker)` returns three integers that select the random numbers.
        mode: "uniform", or "natural", which ignores the scale.
        levels: Steps between the ends of "uniform".
    """

    def __init__(self, shapes, streams: Callable, mode: str, levels: int = 1):
        super().__init__(shapes)
        self.streams, self.mode, self.levels = streams, mode, levels

    def sent(self, worker, tensors):
        stream = self.streams(self.iteration, worker)
        return [rounded(x, self.mode, self.levels, stream, i) for i, x in enumerate(tensors)]


def rounded(x, mode, levels, stream, number) -> np.ndarray:
    """A vector after stochastic rounding; `number` is the tensor's number."""
    c = [np.abs(x).max(initial=np.float32(0))]
    codes = code_numpy(x, c, mode, levels, uniform_numpy(stream, number, x.size))
    return value_numpy(codes, c, mode, levels)


def greedy_probabilities(g, count: int, rounds: int) -> np.ndarray:
    """Algorithm 3 of Wangni et al.: probabilities with the sum `count`."""
    g = np.abs(np.float64(g))
    if count >= g.size:
        return np.ones(g.size)
    p = np.minimum(count * g / (g.sum() or 1), 1)
    for _ in range(rounds):
        active = p != 1
        if not p[active].sum() > 0:
            break
        c = (count - g.size + active.sum()) / p[active].sum()
        if c <= 1:
            break
        p[active] = np.minimum(c * p[active], 1)
    return p


class WangniOracle(_Sum):
    """Elements sampled with these probabilities and divided by them, by systematic sampling.

    Args:
        shapes: Shapes of the tensors.
        numbers: `numbers(step, worker, tensor)` returns one number in [0, 1).
        density: Fraction of the elements.
        rounds: Rounds of the greedy algorithm.
    """

    def __init__(self, shapes, numbers: Callable, density: float, rounds: int):
        super().__init__(shapes)
        self.numbers, self.density, self.rounds = numbers, density, rounds

    def sent(self, worker, tensors):
        return [self._part(g, worker, i) for i, g in enumerate(tensors)]

    def _part(self, g, worker, tensor):
        count = min(max(1, int(np.floor(self.density * g.size + 0.5))), g.size)
        p = greedy_probabilities(g, count, self.rounds)
        sums = np.cumsum(p) + self.numbers(self.iteration, worker, tensor)
        integers = np.arange(1, np.floor(sums[-1]) + 1) if g.size else []
        # the first element at which the cumulative sum reaches it
        at = np.searchsorted(sums, integers)
        sent = np.zeros(g.shape, np.float32)
        sent[at] = g[at] / p[at]
        return sent


class QuantizedFWOracle(_Sum):
    """Stochastic rounding to levels, both to the owner of a block and back to all.

    Args:
        shapes: Shapes of the tensors.
        streams: `streams(step, worker)` returns two triples of integers that select the random
            numbers of the two roundings.
        levels: s.
        sum_levels: s2.
    """

    def __init__(self, shapes, streams: Callable, levels: int, sum_levels: int):
        super().__init__(shapes)
        self.streams, self.levels, self.sum_levels = streams, levels, sum_levels

    def step(self, grads) -> list[np.ndarray]:
        """Runs one step on `grads[worker][tensor]`; returns the totals."""
        totals = [self._total(i, [np.ravel(own[i]) for own in grads]) for i in range(len(grads[0]))]
        self.iteration += 1
        return [t.reshape(s) for t, s in zip(totals, self.shapes, strict=True)]

    def _total(self, tensor: int, own) -> np.ndarray:
        workers, size = len(own), own[0].size
        length = -(-size // workers)
        blocks = [np.pad(g, (0, workers * length - size)).reshape(workers, length) for g in own]
        streams = [self.streams(self.iteration, worker) for worker in range(workers)]
        result = []
        for owner in range(workers):
            number = owner * len(self.shapes) + tensor
            sums, kept = np.zeros(length, np.float32), 0
            for worker, rows in enumerate(blocks):
                sent = rounded(rows[owner], MODE, self.levels, streams[worker][0], number)
                sums = sums + sent
                kept = rows[owner] - sent if worker == owner else kept
            sums = sums + kept
            result.append(rounded(sums, MODE, self.sum_levels, streams[owner][1], tensor))
        return np.concatenate(result)[:size]
