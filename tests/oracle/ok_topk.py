"""Ok-Topk in plain numpy: thresholds, regions, rows of fixed length.

Reference: Li, Hoefler (2022), "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP.
"""

from __future__ import annotations

import math

import numpy as np

from tests.oracle.redsync import top_k_numpy
from tests.oracle.sparse import count

PIECES = 64


class OkTopkOracle:
    """Simulates `workers` workers over many steps.

    Args:
        shapes: Shapes of the bucket's tensors.
        workers: Number of workers and of regions.
        density: Fraction of the bucket's elements.
        thresholds: Steps between evaluations of the thresholds.
        partitions: Steps between choices of the regions.
    """

    def __init__(self, shapes, workers: int, density: float, thresholds: int, partitions: int):
        self.shapes, self.workers = list(shapes), workers
        self.size = sum(int(np.prod(s)) for s in shapes)
        self.k = count(density, self.size)
        self.capacity = min(self.size, math.ceil(1.25 * self.k))
        self.slots = min(self.size, math.ceil(1.25 * self.k / workers))
        self.every, self.iteration = (thresholds, partitions), 0
        self.own = [np.float32(0)] * workers
        self.threshold = np.float32(0)
        self.points = np.linspace(0, self.size, PIECES + 1)
        self.residuals = [[np.zeros(s, np.float32) for s in shapes] for _ in range(workers)]

    def step(self, grads) -> list[np.ndarray]:
        """Runs one step on `grads[worker][tensor]`; returns the totals."""
        exact = self.iteration % self.every[0] == 0
        sums = [
            np.concatenate([(v + g).reshape(-1) for v, g in zip(old, new, strict=True)])
            for old, new in zip(self.residuals, grads, strict=True)
        ]
        edges = np.floor(resampled(self.points, self.workers)).astype(np.int64)
        edges[-1] = self.size
        chosen = [self.select(w, s, exact) for w, s in enumerate(sums)]
        starts = [self.proposed(at) for at in chosen]
        sent = np.zeros((self.workers, self.size), bool)
        total = np.zeros(self.size, np.float32)
        gathered = 0
        for r in range(self.workers):
            collected = np.zeros(self.size, np.float32)
            for w, at in enumerate(chosen):
                at = at[(at >= edges[r]) & (at < edges[r + 1])]
                at = at[top_k_numpy(np.abs(sums[w][at]), self.slots)]
                sent[w, at] = True
                collected[at] += sums[w][at]
            at = top_k_numpy(np.abs(collected), self.slots)
            at = at if exact else at[np.abs(collected[at]) >= self.threshold]
            total[at] = collected[at]
            gathered += at.size
        if exact:
            self.threshold = kth_largest(total, self.k)
            total[np.abs(total) < self.threshold] = 0
        else:
            self.threshold = self.updated(self.threshold, gathered)
        kept = [np.where(sent[w] & (total != 0), 0, s) for w, s in enumerate(sums)]
        self.residuals = [self.tensors(k.astype(np.float32)) for k in kept]
        if self.iteration % self.every[1] == 0:
            means = [sum(s[r] for s in starts) // self.workers for r in range(self.workers)]
            self.points = resampled(np.float64([*means, self.size]), PIECES)
        self.iteration += 1
        return self.tensors(total)

    def select(self, worker: int, x: np.ndarray, exact: bool) -> np.ndarray:
        """Positions that a worker selects; moves its threshold."""
        threshold = kth_largest(x, self.k) if exact else self.own[worker]
        magnitudes = np.where(np.abs(x) >= threshold, np.abs(x), 0)
        at = top_k_numpy(magnitudes, self.capacity)
        self.own[worker] = threshold if exact else self.updated(threshold, at.size)
        return at

    def updated(self, threshold, reached: int):
        """The new threshold after a step in which `reached` elements reached it."""
        if reached >= math.ceil(1.25 * self.k):
            return np.float32(threshold * np.float32(1.012))
        if reached < math.floor(2 / 3 * self.k):
            return np.float32(threshold / np.float32(1.012))
        return threshold

    def proposed(self, at: np.ndarray) -> list[int]:
        """The boundaries of the regions that a worker proposes."""
        shares = range(1, self.workers)
        if at.size:
            return [0, *(int(at[r * at.size // self.workers]) for r in shares)]
        return [0, *(r * self.size // self.workers for r in shares)]

    def tensors(self, vector: np.ndarray) -> list[np.ndarray]:
        """A vector as tensors."""
        ends = np.cumsum([int(np.prod(s)) for s in self.shapes])
        parts = np.split(vector, ends[:-1])
        return [p.reshape(s) for p, s in zip(parts, self.shapes, strict=True)]


def kth_largest(x: np.ndarray, k: int) -> np.float32:
    """The k-th largest magnitude."""
    return np.sort(np.abs(x))[-k]


def resampled(points: np.ndarray, pieces: int) -> np.ndarray:
    """Linear interpolation of equidistant points at `pieces + 1` equidistant places."""
    at = np.arange(pieces + 1) * (len(points) - 1) / pieces
    low = np.minimum(at.astype(int), len(points) - 2)
    return (1 - (at - low)) * points[low] + (at - low) * points[low + 1]
